"""The sequences of one rank: tokens, block tables, and how far each context has been verified here.

It runs in the order of the stream, as a real device's state does: what a step needs is copied out of vLLM's message
when it is launched (`StepPlan`), and applied when its turn comes. No vLLM here, and no torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvberth.emulator.canary import Canary, Corruption, bases_of, extend_sum, extend_sums, next_value

__all__ = ["Arrival", "Contexts", "Continuation", "Found", "StepPlan", "StepResult", "token_of"]

FIRST_TOKEN = 10_356
TOKEN_COUNT = 10_000
"""Answers are made of these: ordinary words in the emulator's own vocabulary, and in common ones."""
_ROOM = 256


def token_of(value: int) -> int:
    """The token that 64 bits stand for."""
    return FIRST_TOKEN + value % TOKEN_COUNT


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sequence that is scheduled for the first time."""

    request_id: str
    tokens: NDArray[np.uint32]
    blocks: NDArray[np.int64]
    computed: int
    count: int


@dataclass(frozen=True, slots=True)
class Continuation:
    """A sequence that the rank knows.

    Attributes:
        new_blocks: to append, or the whole table of a sequence that comes back after preemption.
        resumed: whether it does.
        outputs: tokens of the answer so far, as the scheduler counts them.
        all_tokens: prompt and answer, where the scheduler sends them along.
    """

    request_id: str
    new_blocks: NDArray[np.int64] | None
    resumed: bool
    computed: int
    count: int
    outputs: int
    all_tokens: NDArray[np.uint32] | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, copied out of the scheduler's message.

    Attributes:
        finished: sequences that have left.
        preempted: sequences that have lost their blocks and may come back.
    """

    finished: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    continuations: tuple[Continuation, ...] = ()

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """(tokens before, tokens computed) of each sequence."""
        arrivals = [(each.computed, each.count) for each in self.arrivals]
        return arrivals + [(each.computed, each.count) for each in self.continuations]


@dataclass(frozen=True, slots=True)
class Found:
    """A corruption and whose context it was in."""

    request_id: str
    corruption: Corruption


@dataclass(slots=True)
class StepResult:
    """What a step has made: for each sequence in the plan's order its new token, or none in the middle of a prompt."""

    request_ids: list[str] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    verified_tokens: int = 0
    written_tokens: int = 0

    @property
    def sampled_tokens(self) -> int:
        """How many of the sequences have a new token."""
        return sum(len(each) for each in self.tokens)


@dataclass(slots=True)
class _Context:
    """One sequence.

    Attributes:
        tokens: known so far, in the first `length` places.
        sums: of each of those; see `canary`.
        sound: tokens whose words were written or verified by this rank.
        error: what verification found, folded; 0 if nothing.
        is_late_damage_known: whether a later look has found something.
    """

    tokens: NDArray[np.uint32]
    sums: NDArray[np.uint64]
    length: int
    prompt_length: int
    blocks: NDArray[np.int64]
    sound: int = 0
    error: int = 0
    is_late_damage_known: bool = False

    def append(self, tokens: NDArray[np.uint32]) -> None:
        end = self.length + len(tokens)
        self._make_room(end)
        self.tokens[self.length : end] = tokens
        self.sums[self.length : end] = extend_sums(self._last_sum(), self.length, tokens)
        self.length = end

    def append_one(self, token: int) -> None:
        self._make_room(self.length + 1)
        self.tokens[self.length] = token
        self.sums[self.length] = extend_sum(self._last_sum(), self.length, token)
        self.length += 1

    def _last_sum(self) -> int:
        return int(self.sums[self.length - 1]) if self.length else 0

    def _make_room(self, length: int) -> None:
        if length > len(self.tokens):
            room = max(_ROOM, length - len(self.tokens))
            self.tokens = np.concatenate([self.tokens, np.zeros(room, dtype=np.uint32)])
            self.sums = np.concatenate([self.sums, np.zeros(room, dtype=np.uint64)])


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What a step computes of one sequence: the tokens from `begin` on."""

    request_id: str
    context: _Context
    begin: int
    count: int

    @property
    def end(self) -> int:
        return self.begin + self.count

    def check(self) -> None:
        known = self.context.length
        if self.end > known:
            raise ValueError(f"request {self.request_id}: {self.end} tokens are to be computed, but {known} are known")


class Contexts:
    """All sequences of one rank.

    Args:
        canary: of this rank's cache.
        block_size: tokens per block.
        reduce_error: folds what all ranks have found, so that they give the same answer; called in every step that
            verifies a context, on every rank, once per such context.
        seed: of the places that are sampled.
    """

    def __init__(
        self,
        canary: Canary,
        block_size: int,
        *,
        reduce_error: Callable[[int], int] | None = None,
        seed: int = 0,
    ) -> None:
        self._canary = canary
        self._block_size = block_size
        self._reduce_error = reduce_error
        self._contexts: dict[str, _Context] = {}
        self._random = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self._contexts)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step.

        All words of a step are written before any context is verified, as each layer's are before its attention: vLLM
        lets a request use the blocks of a prefix that another one computes in this very step.
        """
        for request_id in plan.finished:
            self._contexts.pop(request_id, None)
        chunks = [_Chunk(each.request_id, self._arrive(each), each.computed, each.count) for each in plan.arrivals]
        for each in plan.continuations:
            context = self._contexts[each.request_id]
            self._continue(context, each)
            chunks.append(_Chunk(each.request_id, context, each.computed, each.count))
        result = StepResult()
        for chunk in chunks:
            chunk.check()
        self._write(chunks, result)
        for chunk in chunks:
            self._verify(chunk, result)
        for chunk in chunks:
            self._sample_token(chunk, result)
        self._look_again(chunks, result)
        return result

    def _arrive(self, arrival: Arrival) -> _Context:
        context = _Context(
            tokens=np.zeros(0, dtype=np.uint32),
            sums=np.zeros(0, dtype=np.uint64),
            length=0,
            prompt_length=len(arrival.tokens),
            blocks=arrival.blocks,
        )
        context.append(arrival.tokens)
        self._contexts[arrival.request_id] = context
        return context

    def _continue(self, context: _Context, now: Continuation) -> None:
        if now.resumed:
            if now.new_blocks is None:
                raise ValueError(f"request {now.request_id} is resumed without blocks")
            context.blocks = now.new_blocks
            context.sound = 0
        elif now.new_blocks is not None:
            context.blocks = np.concatenate([context.blocks, now.new_blocks])
        length = context.prompt_length + now.outputs
        if now.all_tokens is not None and len(now.all_tokens) == length and length > context.length:
            context.append(now.all_tokens[context.length :])
        # The scheduler has dropped tokens that were sampled ahead of it, such as those of a preempted sequence.
        context.length = min(context.length, length)
        if now.computed < context.sound:
            # Blocks whose load has failed are computed again; what was found may have been in them.
            context.sound = 0
            context.error = 0

    def _write(self, chunks: Sequence[_Chunk], result: StepResult) -> None:
        """The words of all chunks; those of one token, such as a batch that decodes, at once."""
        single = [chunk for chunk in chunks if chunk.count == 1]
        if single:
            positions = np.array([chunk.begin for chunk in single], dtype=np.int64)
            blocks = np.array([chunk.context.blocks[chunk.begin // self._block_size] for chunk in single])
            sums = np.array([chunk.context.sums[chunk.begin] for chunk in single], dtype=np.uint64)
            self._canary.write_tokens(blocks, positions % self._block_size, bases_of(sums))
        for chunk in chunks:
            result.written_tokens += chunk.count
            if chunk.count > 1:
                bases = bases_of(chunk.context.sums[chunk.begin : chunk.end])
                self._canary.write(chunk.context.blocks, chunk.begin, bases)

    def _verify(self, chunk: _Chunk, result: StepResult) -> None:
        """A context's first use here: what arrived from elsewhere, or was cached."""
        context, start = chunk.context, chunk.context.sound
        context.sound = chunk.end
        if start >= chunk.begin:
            return
        corruption = self._canary.verify(context.blocks, start, bases_of(context.sums[start : chunk.begin]))
        result.verified_tokens += chunk.begin - start
        error = 0
        if corruption is not None:
            result.found.append(Found(chunk.request_id, corruption))
            error = corruption.error
        if self._reduce_error is not None:
            error = self._reduce_error(error)
        context.error ^= error

    def _sample_token(self, chunk: _Chunk, result: StepResult) -> None:
        """The next token, unless the prompt goes on."""
        context = chunk.context
        result.request_ids.append(chunk.request_id)
        if chunk.end < context.length:
            result.tokens.append([])
            return
        token = token_of(next_value(int(context.sums[chunk.end - 1]), context.error))
        context.append_one(token)
        result.tokens.append([token])

    def _look_again(self, chunks: Sequence[_Chunk], result: StepResult) -> None:
        """Verify one block of one sequence once more: bytes that land late are found where they land.

        With several ranks it is counted and changes no answer: they would have to agree in every step.
        """
        if not chunks:
            return
        chunk = chunks[int(self._random.integers(len(chunks)))]
        context = chunk.context
        if context.error or context.is_late_damage_known:
            return  # counted already
        block = int(self._random.integers(-(-context.sound // self._block_size)))
        start, end = block * self._block_size, min(context.sound, (block + 1) * self._block_size)
        corruption = self._canary.verify(context.blocks, start, bases_of(context.sums[start:end]))
        if corruption is not None:
            result.found.append(Found(chunk.request_id, corruption))
            context.is_late_damage_known = True
            if self._reduce_error is None:
                context.error = corruption.error
