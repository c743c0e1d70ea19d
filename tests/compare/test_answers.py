"""Modes must give the same answers."""

import pytest
from tests.compare.conftest import measured, record

from kvberth.compare.answers import differing_answers


def answers(mode, *texts):
    return measured(mode=mode, records=[record(index, text_sha256=text) for index, text in enumerate(texts)])


def test_the_one_that_differs_is_found():
    """Most modes say what is right."""
    cells = [answers("push", "a", "b"), answers("pull", "a", "x"), answers("colocated", "a", "b")]
    assert [differing_answers(mode, 0, cells) for mode in ("push", "pull", "colocated")] == [0, 1, 0]


def test_of_two_that_differ_nobody_knows_who_is_right():
    """Both are counted."""
    cells = [answers("push", "a"), answers("pull", "b")]
    assert [differing_answers(mode, 0, cells) for mode in ("push", "pull")] == [1, 1]


@pytest.mark.parametrize("mode", ["push", "alone"])
def test_repetitions_and_lonely_answers_are_not_compared(mode):
    """Another repetition has other prompts; a request that one mode answered says nothing."""
    other = measured(mode="pull", repetition=1, records=[record(0, text_sha256="z")])
    assert differing_answers(mode, 0, [answers(mode, "a"), other]) == 0
