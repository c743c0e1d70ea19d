"""Engines whose blocks differ by a whole factor: tokens find their places, in chunks and behind prefixes."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from tests.mover.rig import BLOCK_BYTES, BLOCK_SIZE, PORT, Rig

from kvberth.layout import num_blocks_for
from kvberth.mover import AdvancePrefill, AnnouncePrefill, AwaitRequest, FinishPrefill
from kvberth.protocol import TransferMode
from kvberth.protocol.events import PrefillAdvanced, PrefillAnnounced, PrefillFinished, RequestWaiting
from kvberth.protocol.ids import RequestId

TOKEN_BYTES = BLOCK_BYTES // BLOCK_SIZE
FACTORS = pytest.mark.parametrize(("producer", "consumer"), [(1, 2), (2, 1), (4, 1), (1, 4)])
SCATTERED = (9, 3, 4, 17, 11, 2, 26, 8, 19, 30, 21, 6, 13)


@dataclass
class Handoff:
    """A prompt whose tokens have bytes of their own on P."""

    producer: int
    consumer: int
    num_tokens: int
    first_token: int = 0
    rig: Rig = field(init=False)

    def __post_init__(self) -> None:
        self.rig = Rig(producer_factor=self.producer, consumer_factor=self.consumer)
        self.blocks_p = SCATTERED[: num_blocks_for(self.num_tokens, BLOCK_SIZE * self.producer)]
        blocks_d = SCATTERED[::-1][: num_blocks_for(self.num_tokens, BLOCK_SIZE * self.consumer)]
        self.blocks_d = blocks_d
        for position in range(self.num_tokens):
            self.place(self.rig.producer.memory, self.producer, self.blocks_p, position)[:] = 100 + position % 150

    @staticmethod
    def place(memory: np.ndarray, factor: int, blocks: tuple[int, ...], position: int) -> np.ndarray:
        """A token's bytes in both layers, a view."""
        size = BLOCK_SIZE * factor
        block, within = blocks[position // size], position % size * TOKEN_BYTES
        return memory[:, block, within : within + TOKEN_BYTES]

    def announce(self) -> None:
        event = PrefillAnnounced(RequestId("p-1"), self.num_tokens, b"digest")
        self.rig.producer.core.command(AnnouncePrefill((self.rig.key,), event), self.rig.now)

    def advance(self, first: int, end: int, *, is_complete: bool = False) -> None:
        event = PrefillAdvanced(first, self.blocks_p[first:end], is_complete)
        self.rig.producer.core.command(AdvancePrefill((self.rig.key,), event), self.rig.now)

    def finish(self) -> None:
        self.rig.producer.core.command(FinishPrefill((self.rig.key,), PrefillFinished(self.blocks_p)), self.rig.now)

    def wait(self, mode: TransferMode) -> None:
        blocks = self.blocks_d[self.first_token // (BLOCK_SIZE * self.consumer) :]
        event = RequestWaiting(RequestId("d-1"), 0, mode, self.first_token, self.num_tokens, b"digest", blocks)
        self.rig.consumer.core.command(AwaitRequest(self.rig.key, "P", PORT, event), self.rig.now)

    def num_tokens_there(self) -> int:
        """Tokens on D that are P's."""
        there = 0
        for position in range(self.num_tokens):
            wanted = self.place(self.rig.producer.memory, self.producer, self.blocks_p, position)
            there += bool(
                (self.place(self.rig.consumer.memory, self.consumer, self.blocks_d, position) == wanted).all()
            )
        return there


@FACTORS
@pytest.mark.parametrize("mode", list(TransferMode))
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 63, 64, 100, 128])
def test_every_token_arrives(producer, consumer, mode, num_tokens):
    """Prompts that end anywhere in a block of either size."""
    handoff = Handoff(producer, consumer, num_tokens)
    handoff.announce()
    handoff.wait(mode)
    handoff.finish()
    assert handoff.rig.settle().received() == [("d-1", True, "none")]
    assert handoff.num_tokens_there() == num_tokens
    assert handoff.rig.released() == {"p-1"}


@FACTORS
@pytest.mark.parametrize("mode", list(TransferMode))
def test_only_what_lies_behind_the_prefix_is_moved(producer, consumer, mode):
    """D holds its first 64 tokens, which may end in the middle of a block of P's."""
    handoff = Handoff(producer, consumer, 150, first_token=64 if consumer > 1 else 80)
    handoff.announce()
    handoff.wait(mode)
    handoff.finish()
    assert handoff.rig.settle().received() == [("d-1", True, "none")]
    assert handoff.num_tokens_there() == 150 - handoff.first_token


@FACTORS
def test_chunks_flow_in_units_of_the_smaller_blocks(producer, consumer):
    """Whole blocks of P go at once, also into a part of a block of D's."""
    handoff = Handoff(producer, consumer, 100)
    handoff.announce()
    handoff.wait(TransferMode.PUSH)
    handoff.rig.settle()
    handoff.advance(0, 1)
    handoff.rig.settle()
    assert handoff.num_tokens_there() == min(100, BLOCK_SIZE * producer)
    handoff.advance(1, len(handoff.blocks_p), is_complete=True)
    handoff.finish()
    assert handoff.rig.settle().received() == [("d-1", True, "none")]
    assert handoff.num_tokens_there() == 100


def test_blocks_of_an_unspoken_size_are_refused():
    """A registration must count in the size that its engine's card names."""
    handoff = Handoff(1, 2, 40)
    handoff.rig.consumer.core._consuming._machine._block_size = BLOCK_SIZE
    handoff.announce()
    handoff.wait(TransferMode.PUSH)
    assert handoff.rig.settle().received() == [("d-1", False, "invalid_blocks")]
