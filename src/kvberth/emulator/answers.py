"""The answer that an emulated engine owes, computed from the prompt alone: what tests and drills compare with."""

from collections.abc import Sequence

import numpy as np

from kvberth.emulator.canary import extend_sum, extend_sums, next_value
from kvberth.emulator.contexts import token_of
from kvberth.emulator.model_files import text_of

__all__ = ["answer_text", "answer_tokens"]


def answer_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """The first `count` tokens of the answer to these token ids; they depend on nothing else."""
    length = len(prompt)
    last = int(extend_sums(0, 0, np.array(prompt, dtype=np.uint32))[-1])
    answer = []
    for position in range(length, length + count):
        token = token_of(next_value(last, 0))
        answer.append(token)
        last = extend_sum(last, position, token)
    return answer


def answer_text(prompt: Sequence[int], count: int) -> str:
    """The same as clients read it."""
    return "".join(map(text_of, answer_tokens(prompt, count)))
