"""Whether the modes answered alike: the same request must get the same text in every mode. Pure."""

from collections import Counter
from collections.abc import Sequence

from kvberth.compare.store import MeasuredCell

__all__ = ["differing_answers"]


def differing_answers(mode: str, repetition: int, cells: Sequence[MeasuredCell]) -> int:
    """How many answers of `mode` are not the ones that most modes gave to the same request.

    A request that only one mode answered says nothing, nor does one that two modes answer in two ways: then both count
    as differing, since nobody knows who is right.

    Args:
        cells: the same cell in all modes and repetitions.
    """
    answers = {
        each.mode: {record.index: record.text_sha256 for record in each.records if record.text_sha256 is not None}
        for each in cells
        if each.repetition == repetition
    }
    own = answers.get(mode, {})
    differing = 0
    for index, answer in own.items():
        votes = Counter(texts[index] for texts in answers.values() if index in texts)
        (winner, most), *rest = votes.most_common(2)
        is_tie = bool(rest) and rest[0][1] == most
        differing += is_tie or answer != winner
    return differing
