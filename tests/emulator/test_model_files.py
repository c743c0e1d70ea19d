"""The folder that stands for a model: its files, and a tokenizer that gives back every text and every answer."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvberth.emulator import EmulatorError, load_profile, model_folder, profile_names
from kvberth.emulator.contexts import FIRST_TOKEN, TOKEN_COUNT
from kvberth.emulator.model_files import is_profile, profile_of_folder
from kvberth.emulator.profile import dump_profile

SMALL = load_profile("small")
ANSWERS = range(FIRST_TOKEN, FIRST_TOKEN + TOKEN_COUNT)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Where folders are made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvberth" / "emulator"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """As vLLM loads it."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return transformers.AutoTokenizer.from_pretrained(model_folder("small"))


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


# The tokenizer.


@given(st.text())
@settings(max_examples=300)
def test_any_text_is_given_back(tokenizer, text):
    """All scripts, control characters and spaces, to the last byte."""
    assert tokenizer.decode(encode(tokenizer, text)) == text


@pytest.mark.parametrize(
    "text",
    [
        " baba",
        "baba",
        " bababa caca",
        "  baba",
        "ba ba",
        "babà",
        "It's 12 o'clock.\n\n\tYes!",
        "<|im_end|>x",
        "日本語🚢",
    ],
)
def test_these_texts_are_given_back(tokenizer, text):
    """Words of the vocabulary beside others, and the special tokens' own names."""
    assert tokenizer.decode(encode(tokenizer, text)) == text


def test_answers_are_words(tokenizer):
    """A space and two syllables, each token another word."""
    words = [tokenizer.decode([token]) for token in ANSWERS]
    assert len(set(words)) == TOKEN_COUNT
    for word in words:
        assert len(word) == 5
        assert word[0] == " "
        assert all(letter in "bcdfghjklmnpqrstvwxz" for letter in word[1::2])
        assert all(letter in "aeiou" for letter in word[2::2])


@given(st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=60))
def test_answers_encode_back_to_their_tokens(tokenizer, tokens):
    """The next turn of a conversation has the tokens which the engine has cached."""
    assert encode(tokenizer, tokenizer.decode(tokens)) == tokens


@given(st.text(), st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=10))
def test_answers_behind_any_line_encode_back(tokenizer, text, tokens):
    """What stands before does not change how they are cut."""
    prompt = encode(tokenizer, f"{text}\n:")
    assert encode(tokenizer, f"{text}\n:" + tokenizer.decode(tokens)) == [*prompt, *tokens]


def test_no_answer_is_special(tokenizer):
    """A special token would be hidden from the client, and make the detokenizer slow."""
    assert not set(tokenizer.all_special_ids) & set(ANSWERS)
    assert max(tokenizer.get_vocab().values()) < SMALL.model.vocab_size


def test_the_chat_template_renders(tokenizer):
    """A conversation and the place of its answer; the roles' marks are tokens of their own."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    marks = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    tokens = encode(tokenizer, text)
    assert [tokens.count(mark) for mark in marks] == [3, 2]


def test_a_second_turn_begins_with_the_first(tokenizer):
    """Template and answer together: the tokens of the first turn are a prefix of the second one's."""
    first = [{"role": "user", "content": "Hello"}]
    answer = tokenizer.decode([FIRST_TOKEN + 7, FIRST_TOKEN + 4711, FIRST_TOKEN])
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
    texts = [
        tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True) for each in (first, second)
    ]
    cached = [*encode(tokenizer, texts[0]), FIRST_TOKEN + 7, FIRST_TOKEN + 4711, FIRST_TOKEN]
    assert encode(tokenizer, texts[1])[: len(cached)] == cached


# The folder.


@pytest.mark.parametrize("name", profile_names())
def test_the_config_has_the_profile_s_shape(cache, name):
    """By the names that vLLM reads."""
    model = load_profile(name).model
    config = json.loads((model_folder(name) / "config.json").read_text())
    assert config["architectures"] == [model.architecture]
    shape = {
        "model_type": model.model_type,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads,
        "num_attention_heads": model.attention_heads,
        "head_dim": model.head_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.context_tokens,
    }
    assert {key: config[key] for key in shape} == shape
    assert config["eos_token_id"] < model.vocab_size


@pytest.mark.parametrize("name", profile_names())
def test_transformers_takes_the_config(cache, name):
    """As a model of its type."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.AutoConfig.from_pretrained(model_folder(name))
    assert config.num_hidden_layers == load_profile(name).model.layers


@pytest.mark.parametrize("name", profile_names())
def test_the_folder_knows_its_profile(cache, name):
    """The engine reads it from there."""
    assert profile_of_folder(str(model_folder(name))) == load_profile(name)


def test_other_folders_have_no_profile(tmp_path):
    """A real model's, or none at all."""
    assert profile_of_folder(str(tmp_path)) is None
    assert profile_of_folder(str(tmp_path / "nothing")) is None


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in [folder, *folder.rglob("*")]}


def test_a_folder_is_made_once(cache):
    """The second call finds it, by profile or by name."""
    folder = model_folder("small")
    before = state_of(cache)
    assert model_folder(SMALL) == model_folder("small") == folder
    assert state_of(cache) == before


def test_a_changed_profile_is_another_folder(cache):
    """Whatever has changed in it; the old one stays."""
    folder = model_folder(SMALL)
    timing = msgspec.structs.replace(SMALL.timing, step_us=SMALL.timing.step_us + 1)
    changed = msgspec.structs.replace(SMALL, timing=timing)
    other = model_folder(changed)
    assert other != folder
    assert (profile_of_folder(str(folder)), profile_of_folder(str(other))) == (SMALL, changed)


def test_others_may_read_it(cache):
    """An engine may run as somebody else than who made the folder; nothing unfinished is left."""
    folder = model_folder("small")
    assert folder.stat().st_mode & 0o777 == 0o755
    assert list(cache.iterdir()) == [folder]


def test_an_unknown_profile_makes_nothing(cache):
    """The error is the profile's."""
    with pytest.raises(EmulatorError, match="there is no profile smal"):
        model_folder("smal")
    assert not cache.exists()


def test_who_is_second_takes_the_first_one_s(cache, monkeypatch):
    """Two engines start at once; both get the folder, and nothing unfinished is left."""
    rename = Path.rename

    def lose(work: Path, target: Path) -> Path:
        # Another engine makes the folder, and is done just before this one's work is put into its place.
        monkeypatch.setattr(Path, "rename", rename)
        model_folder("small")
        return rename(work, target)

    monkeypatch.setattr(Path, "rename", lose)
    folder = model_folder("small")
    assert list(cache.iterdir()) == [folder]
    assert profile_of_folder(str(folder)) == SMALL


def test_what_could_not_be_finished_is_removed(cache, monkeypatch):
    """A disk that is full, say."""

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no space left"):
        model_folder("small")
    assert list(cache.iterdir()) == []


def test_many_at_once_get_the_same_folder(cache):
    """Six threads ask for one profile each, and make what is shared above the folders at once."""
    profiles = [msgspec.structs.replace(SMALL, title=f"profile {number}") for number in range(6)]
    barrier = threading.Barrier(6, timeout=30)

    def make(profile):
        barrier.wait()
        return model_folder(profile)

    with ThreadPoolExecutor(6) as pool:
        folders = list(pool.map(make, profiles))
    assert [profile_of_folder(str(folder)) for folder in folders] == profiles
    assert sorted(cache.iterdir()) == sorted(folders)


@pytest.mark.parametrize("name", ["org/model", "../outside"])
def test_a_name_that_is_no_folder_s_is_refused(cache, tmp_path, name):
    """Before anything is made."""
    path = tmp_path / "mine.toml"
    path.write_text(dump_profile(msgspec.structs.replace(SMALL, name=name)))
    with pytest.raises(EmulatorError, match="name"):
        model_folder(str(path))


# What `--model` names.


@pytest.mark.parametrize(
    ("model", "expected"),
    [("small", True), ("typo", True), ("mine.toml", True), ("/some/where/mine.toml", True), ("org/model", False)],
)
def test_names_and_files_are_profiles(tmp_path, monkeypatch, model, expected):
    """A name without a slash, or a .toml file; a repository's name is left to vLLM."""
    monkeypatch.chdir(tmp_path)
    assert is_profile(model) is expected


def test_a_folder_that_is_there_is_a_model(tmp_path, monkeypatch):
    """By a relative or an absolute path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert not is_profile("model")
    assert not is_profile(str(tmp_path / "model"))
