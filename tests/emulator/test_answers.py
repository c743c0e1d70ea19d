"""The answers that others compare with are those that the emulated engine gives."""

import pytest
from tests.emulator.rig import Engine, Request, make_tokens

from kvberth.emulator.answers import answer_text, answer_tokens
from kvberth.emulator.model_files import text_of


@pytest.mark.parametrize("length", [1, 5, 70])
def test_answers_are_the_engine_s(length):
    """Token by token, for prompts of any length."""
    request, engine = Request("r", make_tokens(length)), Engine("layer-major")
    engine.prefill(request)
    engine.decode(request, 20)
    assert answer_tokens(make_tokens(length).tolist(), 21) == request.answer


def test_text_is_one_word_per_token():
    """With the space before it, as the detokenizer gives it."""
    words = answer_text([1, 2, 3], 20).split(" ")
    assert words[0] == ""
    assert [f" {word}" for word in words[1:]] == [text_of(token) for token in answer_tokens([1, 2, 3], 20)]
