"""The folder that vLLM takes for the model: a `config.json` with the profile's shape, and a tokenizer. No weights.

The tokenizer is made here, so that nothing is downloaded: byte-level BPE over all 256 bytes, 100 syllables and the
10,000 words of two syllables, with and without a space before them. Any text can be encoded (plain English takes about
one token per letter or two); what an emulated engine answers is made of such words, and encodes back to the very tokens
it was decoded from, so that the next turn of a conversation hits the prefix cache as with a real model.
"""

import hashlib
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from kvberth.emulator.profile import Profile, dump_profile, load_profile, parse_profile

__all__ = ["PROFILE_FILE", "is_profile", "model_folder", "profile_of_folder", "text_of"]

PROFILE_FILE = "kvberth-profile.toml"
_FORMAT = "1"
"""Counts up when the files change, so that folders made by older versions are not taken."""

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def is_profile(model: str) -> bool:
    """Whether vLLM's `--model` names a profile, and not a folder or a repository."""
    return model.endswith(".toml") or ("/" not in model and not Path(model).exists())


def model_folder(profile: Profile | str) -> Path:
    """The folder for a profile, made if it is not there yet.

    Raises:
        EmulatorError: there is no such profile.
    """
    if isinstance(profile, str):
        profile = load_profile(profile)
    text = dump_profile(profile)
    digest = hashlib.sha256(f"{_FORMAT}\0{text}".encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvberth" / "emulator"
    target = cache / f"{profile.name}-{digest}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="making-", dir=cache))
    try:
        (work / PROFILE_FILE).write_text(text)
        (work / "config.json").write_text(json.dumps(_config(profile), indent=1))
        (work / "tokenizer.json").write_text(json.dumps(_tokenizer(), ensure_ascii=False))
        (work / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(profile), indent=1))
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:
            # Somebody else may have been faster; both results are the same.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def profile_of_folder(folder: str) -> Profile | None:
    """The profile that a folder was made for; None if it was not."""
    file = Path(folder) / PROFILE_FILE
    return parse_profile(file.read_text(), str(file)) if file.is_file() else None


def _config(profile: Profile) -> dict[str, Any]:
    model = profile.model
    return {
        "architectures": [model.architecture],
        "model_type": model.model_type,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads,
        "num_attention_heads": model.attention_heads,
        "head_dim": model.head_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.context_tokens,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "bos_token_id": _special_id(0),
        "eos_token_id": _special_id(2),
    }


def _tokenizer() -> dict[str, Any]:
    vocabulary, merges = _vocabulary()
    special = [
        {
            "id": _special_id(index),
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, text in enumerate(_SPECIAL)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "byte_fallback": False},
    }


def _tokenizer_config(profile: Profile) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": profile.model.context_tokens,
        "bos_token": None,
        "eos_token": _SPECIAL[2],
        "pad_token": _SPECIAL[0],
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }


def text_of(token: int) -> str:
    """What a token reads, of those that are made of ASCII."""
    return _texts()[token].replace("Ġ", " ")


@cache
def _texts() -> list[str]:
    return list(_vocabulary()[0])


def _vocabulary() -> tuple[dict[str, int], list[list[str]]]:
    """Tokens with their ids, and the merges that make them, in the order of their rank."""
    tokens = _byte_alphabet()
    syllables = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxz" for vowel in "aeiou"]
    words = [first + second for first in syllables for second in syllables]
    spaced = ["Ġ" + word for word in words]
    merges = [[syllable[0], syllable[1]] for syllable in syllables]
    merges += [[word[:2], word[2:]] for word in words]
    merges += [["Ġ", word] for word in words]
    ids = {token: index for index, token in enumerate([*tokens, *syllables, *words, *spaced])}
    return ids, merges


def _special_id(index: int) -> int:
    return 256 + 100 + 2 * 10_000 + index


def _byte_alphabet() -> list[str]:
    """The printable stand-ins of the 256 bytes in byte-level BPE (as in GPT-2's vocabulary)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_in = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_in)) for byte in range(256)]
