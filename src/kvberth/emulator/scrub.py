"""Spoiling the blocks of sequences that have left, on an engine that only receives.

A decode worker that is sent the same prompt twice may put it into the very same blocks; a transfer that never came
would then go unnoticed, since the blocks still hold the right words. So they are spoiled when the sequence goes: after
its own last step, which may still write them, and before the connector can let a peer write into the blocks again. vLLM
gives blocks of a decode worker back only behind that step (`defer_block_free` of its scheduler), so there is such a
moment.

All of this is the engine's thread.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvberth.emulator.contexts import StepPlan
from kvberth.emulator.stream import Event

__all__ = ["Scrubber"]


@dataclass(slots=True)
class _Sequence:
    """What the host knows of a sequence: its blocks, and its last step."""

    table: list[NDArray[np.int64]]
    last_step: Event


class Scrubber:
    """Knows the block tables as the host does.

    Args:
        spoil: makes their words wrong.
    """

    def __init__(self, spoil: Callable[[NDArray[np.int64]], None]) -> None:
        self._spoil = spoil
        self._sequences: dict[str, _Sequence] = {}
        self._leaving: list[_Sequence] = []

    def before_step(self, plan: StepPlan) -> None:
        """Spoil what has left, if its last step is done. Before the connector sees the step.

        A preempted sequence has no blocks any more, and those that it had may be somebody else's by now.
        """
        for request_id in plan.preempted:
            self._sequences.pop(request_id, None)
        for request_id in plan.finished:
            if (sequence := self._sequences.pop(request_id, None)) is not None:
                self._leaving.append(sequence)
        waiting = []
        for sequence in self._leaving:
            if sequence.last_step.query():
                self._spoil(np.concatenate(sequence.table))
            else:
                waiting.append(sequence)
        self._leaving = waiting

    def after_launch(self, plan: StepPlan, event: Event) -> None:
        """Note the tables of a step, and the event behind it."""
        for arrival in plan.arrivals:
            self._sequences[arrival.request_id] = _Sequence([arrival.blocks], event)
        for continuation in plan.continuations:
            if continuation.resumed and continuation.new_blocks is not None:
                self._sequences[continuation.request_id] = _Sequence([continuation.new_blocks], event)
                continue
            sequence = self._sequences[continuation.request_id]
            sequence.last_step = event
            if continuation.new_blocks is not None:
                sequence.table.append(continuation.new_blocks)
