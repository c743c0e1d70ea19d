"""The canary: what an emulated KV cache holds in place of keys and values, and how it is verified.

The word of a token depends on the token, its position, *all tokens before it* (as real keys and values do in every
layer but the first) and the layer:

    term(t)   = mix(token[t] * A + t * B)                    64 bits
    sum(t)    = term(0) + ... + term(t)                      modulo 2**64
    base(t)   = mix(sum(t))
    word(l,t) = base(t) xor mix(l)                           two halves of 32 bits: one per head slot

so a block that is stale, of another place, layer, request or prefix differs in all of its words but for one case in
2**64, and everything is a vector operation. `mix` is the finalizer of splitmix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014; constants of D. Stafford's Mix13).

A page as the connector and the transfer library see it, for two head slots and 16 tokens of 4 bytes each:

    | slot 0: t0 t1 ... t15 | slot 1: t0 t1 ... t15 |        128 bytes

No vLLM here, and no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvberth.emulator.profile import HEAD_SLOTS

__all__ = ["Canary", "Corruption", "Words", "bases_of", "extend_sum", "extend_sums", "next_value"]

Words: TypeAlias = NDArray[np.uint32]
"""A KV cache: (layers, blocks, head slots, tokens per block), with whatever strides the layout has."""

_TOKEN = np.uint64(0x9E3779B97F4A7C15)
_POSITION = np.uint64(0xD1B54A32D192ED03)
_LAYER = np.uint64(0x8CB92BA72F3D8DD7)
_ANSWER = np.uint64(0x2545F4914F6CDD1D)
_MASK = (1 << 64) - 1
_CACHED_WORDS = 1 << 16


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


def _mix_one(value: int) -> int:
    """`_mix` of one value, many times faster for it than numpy."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def extend_sum(last: int, position: int, token: int) -> int:
    """`sum(t)` of one token: what `extend_sums` gives for it."""
    return (last + _mix_one((token * int(_TOKEN) + position * int(_POSITION)) & _MASK)) & _MASK


def extend_sums(last: int, start: int, tokens: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """`sum(t)` for tokens at positions `start`, `start + 1`, ...; `last` is `sum(start - 1)`, or 0."""
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    terms = _mix(tokens.astype(np.uint64) * _TOKEN + positions * _POSITION)
    if len(terms):
        terms[:1] += np.array([last], dtype=np.uint64)  # an array wraps around in silence, a scalar warns
    return np.cumsum(terms, dtype=np.uint64)


def bases_of(sums: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`base(t)` of `sum(t)`."""
    return _mix(sums)


def next_value(last_sum: int, error: int) -> int:
    """64 bits from which the next token is derived.

    Args:
        last_sum: `sum` of the last token.
        error: what differed in the stored context, 0 when nothing did. Anything else makes another token.
    """
    return _mix_one(last_sum ^ int(_ANSWER) ^ error)


@dataclass(frozen=True, slots=True)
class Corruption:
    """The first wrong word of a context, in the order of layers, then positions.

    Attributes:
        layer: whose cache holds it.
        block: its id in the cache.
        slot: the token's place in the block.
        position: the token's place in the context.
        expected, found: words of the first head slot that differs.
        wrong_words: how many differ in all.
        error: folds all differences into 64 bits, never 0.
    """

    layer: int
    block: int
    slot: int
    position: int
    expected: int
    found: int
    wrong_words: int
    error: int

    def __str__(self) -> str:
        what = "nothing was ever written there" if self.found == 0 else f"found {self.found:#010x}"
        return (
            f"layer {self.layer}, block {self.block}, slot {self.slot} (position {self.position}): "
            f"expected {self.expected:#010x}, {what}; {self.wrong_words} words are wrong"
        )


@dataclass(frozen=True, slots=True)
class _Difference:
    """Stored xor expected words: (layers, tokens, head slots), from a layer and a position on."""

    layer: int
    position: int
    words: NDArray[np.uint32]

    def first(self) -> tuple[int, int, int, int]:
        """(layer, position, head slot, difference) of the first word that is wrong."""
        layer, token, head = (int(index) for index in np.argwhere(self.words)[0])
        return self.layer + layer, self.position + token, head, int(self.words[layer, token, head])

    def fold(self) -> NDArray[np.uint64]:
        """64 bits that tell this difference from others, by its words and their places."""
        layers, tokens, heads = np.nonzero(self.words)
        places = ((layers + self.layer) << 40) + ((tokens + self.position) << 4) + heads
        mixed = _mix(places.astype(np.uint64) * _LAYER + self.words[layers, tokens, heads].astype(np.uint64))
        folded: NDArray[np.uint64] = np.sum(mixed, dtype=np.uint64, keepdims=True)
        return folded


class Canary:
    """Writes and verifies words in one rank's cache.

    Args:
        words: the cache, writable.
        first_slot: which of the model's head slots this rank's first one is.
    """

    def __init__(self, words: Words, first_slot: int = 0) -> None:
        layers, _, slots, self._block_size = words.shape
        if not 0 <= first_slot <= HEAD_SLOTS - slots:
            raise ValueError(
                f"head slots {first_slot} to {first_slot + slots - 1} are not within 0 to {HEAD_SLOTS - 1}"
            )
        self._words = words
        self._slots = slice(first_slot, first_slot + slots)
        constants = _mix((np.arange(layers, dtype=np.uint64) + np.uint64(1)) * _LAYER)
        self._layers = self._halves(constants)

    @property
    def words_per_token(self) -> int:
        """In all layers of this rank."""
        layers, _, slots, _ = self._words.shape
        return int(layers * slots)

    def write(self, blocks: NDArray[np.int64], start: int, bases: NDArray[np.uint64]) -> None:
        """Write the words of the tokens at `start`, `start + 1`, ... of a context whose block table is `blocks`."""
        halves = self._halves(bases)
        for first, last in self._edges(start, len(bases)):
            positions = np.arange(first, last)
            self._write_scattered(
                blocks[positions // self._block_size],
                positions % self._block_size,
                halves[first - start : last - start],
            )
        first, last = self._whole_blocks(start, len(bases))
        if first < last:
            pages = self._pages(halves[first - start : last - start])
            ids = blocks[first // self._block_size : last // self._block_size]
            for layer, constant in enumerate(self._layers):
                self._words[layer, ids] = pages ^ constant[None, :, None]

    def write_tokens(self, blocks: NDArray[np.int64], slots: NDArray[np.int64], bases: NDArray[np.uint64]) -> None:
        """Write one token each into (block, slot): a decode step of a whole batch at once."""
        self._write_scattered(blocks, slots, self._halves(bases))

    def verify(self, blocks: NDArray[np.int64], start: int, bases: NDArray[np.uint64]) -> Corruption | None:
        """Compare the stored words of the tokens at `start`, `start + 1`, ... with what they must be."""
        halves = self._halves(bases)
        wrong: list[_Difference] = []
        for first, last in self._edges(start, len(bases)):
            positions = np.arange(first, last)
            stored = self._words[:, blocks[positions // self._block_size], :, positions % self._block_size]
            difference = stored ^ halves[first - start : last - start, None, :] ^ self._layers[None, :, :]
            if difference.any():
                wrong.append(_Difference(0, first, difference.transpose(1, 0, 2)))
        first, last = self._whole_blocks(start, len(bases))
        if first < last:
            pages = self._pages(halves[first - start : last - start])
            ids = blocks[first // self._block_size : last // self._block_size]
            # As many layers at once as fit a core's cache beside the pages.
            together = max(1, _CACHED_WORDS // pages.size)
            for layer in range(0, len(self._layers), together):
                stored = self._words[layer : layer + together, ids]
                stored ^= pages
                stored ^= self._layers[layer : layer + together, None, :, None]
                if stored.any():
                    difference = stored.transpose(0, 1, 3, 2).reshape(len(stored), last - first, -1)
                    wrong.append(_Difference(layer, first, difference))
        return self._describe(blocks, start, halves, wrong) if wrong else None

    def _describe(
        self, blocks: NDArray[np.int64], start: int, halves: NDArray[np.uint32], wrong: Sequence[_Difference]
    ) -> Corruption:
        layer, position, head, difference = min(each.first() for each in wrong)
        expected = int(halves[position - start, head] ^ self._layers[layer, head])
        folded = np.zeros(1, dtype=np.uint64)
        for each in wrong:
            folded += each.fold()
        return Corruption(
            layer=layer,
            block=int(blocks[position // self._block_size]),
            slot=position % self._block_size,
            position=position,
            expected=expected,
            found=expected ^ difference,
            wrong_words=sum(int(np.count_nonzero(each.words)) for each in wrong),
            error=_mix_one(int(folded[0])) or 1,
        )

    def spoil(self, blocks: NDArray[np.int64]) -> None:
        """Make the first word of each of these pages wrong, so that a page which is not written again is found."""
        self._words[:, blocks, 0, 0] = 0

    def _write_scattered(self, blocks: NDArray[np.int64], slots: NDArray[np.int64], halves: NDArray[np.uint32]) -> None:
        self._words[:, blocks, :, slots] = halves[:, None, :] ^ self._layers[None, :, :]

    def _halves(self, values: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """This rank's head slots of 64-bit words: (n, slots)."""
        return np.ascontiguousarray(values).view(np.uint32).reshape(-1, HEAD_SLOTS)[:, self._slots]

    def _pages(self, halves: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Whole blocks' words before the layer is mixed in: (blocks, slots, tokens per block)."""
        return np.ascontiguousarray(halves.reshape(-1, self._block_size, halves.shape[1]).transpose(0, 2, 1))

    def _whole_blocks(self, start: int, count: int) -> tuple[int, int]:
        """The positions that fill blocks, from the first to behind the last; none if first >= last."""
        return -(-start // self._block_size) * self._block_size, (start + count) // self._block_size * self._block_size

    def _edges(self, start: int, count: int) -> list[tuple[int, int]]:
        """The positions before and behind the whole blocks."""
        end = start + count
        first, last = self._whole_blocks(start, count)
        if first >= last:
            return [(start, end)] if count else []
        return [edge for edge in ((start, first), (last, end)) if edge[0] < edge[1]]
