"""Caches, and a scheduler as vLLM has one: it gives out blocks in any order and plans one step after another."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvberth.emulator.canary import Canary, Words, bases_of, extend_sums
from kvberth.emulator.contexts import Arrival, Contexts, Continuation, StepPlan, StepResult

LAYOUTS = ("layer-major", "block-major")
LAYERS, BLOCKS, BLOCK_SIZE = 3, 64, 16


def make_words(
    layout: str = "layer-major",
    *,
    layers: int = LAYERS,
    blocks: int = BLOCKS,
    slots: int = 2,
    block_size: int = BLOCK_SIZE,
) -> Words:
    """An empty cache: (layers, blocks, head slots, tokens per block), whatever its order in memory."""
    if layout == "block-major":
        return np.zeros((blocks, layers, slots, block_size), dtype=np.uint32).transpose(1, 0, 2, 3)
    return np.zeros((layers, blocks, slots, block_size), dtype=np.uint32)


def make_tokens(count: int, seed: int = 0) -> NDArray[np.uint32]:
    """A prompt; other seeds make other ones."""
    return np.random.default_rng(seed).integers(0, 150_000, count, dtype=np.uint32)


def make_blocks(count: int, seed: int = 0, blocks: int = BLOCKS) -> NDArray[np.int64]:
    """A block table in no order."""
    return np.random.default_rng(seed).permutation(blocks)[:count].astype(np.int64)


def make_bases(tokens: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Of a whole context."""
    return bases_of(extend_sums(0, 0, tokens))


def blocks_for(tokens: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-tokens // BLOCK_SIZE)


def split(length: int, cuts: Sequence[int]) -> list[int]:
    """The lengths of the parts of a prompt that is cut at these places."""
    edges = [0, *sorted({cut % length for cut in cuts} - {0}), length]
    return [end - start for start, end in itertools.pairwise(edges)]


@dataclass
class Request:
    """What a scheduler knows of one.

    Attributes:
        announced: how many of the blocks the rank has been told.
        answer: the tokens that the scheduler has taken from results.
    """

    request_id: str
    prompt: NDArray[np.uint32]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    announced: int = 0
    answer: list[int] = field(default_factory=list)
    has_arrived: bool = False
    is_preempted: bool = False

    @property
    def tokens(self) -> NDArray[np.uint32]:
        return np.concatenate([self.prompt, np.array(self.answer, dtype=np.uint32)])


class Engine:
    """One rank, and the scheduler that plans its steps."""

    def __init__(
        self,
        layout: str = "layer-major",
        *,
        seed: int = 0,
        slots: int = 2,
        first_slot: int = 0,
        reduce_error: Callable[[int], int] | None = None,
    ) -> None:
        self.words = make_words(layout, slots=slots)
        self.contexts = Contexts(
            Canary(self.words, first_slot),
            BLOCK_SIZE,
            reduce_error=reduce_error,
            seed=seed,
        )
        self._free = np.random.default_rng(seed).permutation(BLOCKS).tolist()
        self._finished: list[str] = []

    def give_blocks(self, request: Request, tokens: int) -> None:
        """Blocks for so many tokens, beside those that it has."""
        request.blocks += [self._free.pop() for _ in range(blocks_for(tokens) - len(request.blocks))]

    def plan(self, *scheduled: tuple[Request, int]) -> StepPlan:
        """A step that computes so many tokens of each of these. Arrivals come first, as in vLLM's message."""
        arrivals, continuations = [], []
        for request, count in scheduled:
            self.give_blocks(request, request.computed + count)
            new, request.announced = request.blocks[request.announced :], len(request.blocks)
            if not request.has_arrived:
                request.has_arrived = True
                table = np.array(request.blocks, dtype=np.int64)
                arrivals.append(Arrival(request.request_id, request.prompt, table, request.computed, count))
                continue
            resumed, request.is_preempted = request.is_preempted, False
            continuations.append(
                Continuation(
                    request_id=request.request_id,
                    new_blocks=np.array(new, dtype=np.int64) if new else None,
                    resumed=resumed,
                    computed=request.computed,
                    count=count,
                    outputs=len(request.answer),
                    all_tokens=request.tokens if resumed else None,
                )
            )
        finished, self._finished = tuple(self._finished), []
        return StepPlan(finished, (), tuple(arrivals), tuple(continuations))

    def step(self, *scheduled: tuple[Request, int]) -> StepResult:
        """Plan and run one, and take what it has made."""
        result = self.contexts.run(self.plan(*scheduled))
        made = dict(zip(result.request_ids, result.tokens, strict=True))
        for request, count in scheduled:
            request.computed += count
            request.answer += made[request.request_id]
        return result

    def prefill(self, request: Request, chunks: Sequence[int] = ()) -> list[StepResult]:
        """The prompt, in these chunks or in one."""
        left = len(request.prompt) - request.computed
        return [self.step((request, count)) for count in chunks or [left]]

    def decode(self, request: Request, steps: int) -> list[StepResult]:
        """So many steps of one token."""
        return [self.step((request, 1)) for _ in range(steps)]

    def preempt(self, request: Request) -> None:
        """Take its blocks away; its next step begins anew."""
        self._free = [*request.blocks, *self._free]
        request.blocks, request.announced, request.computed, request.is_preempted = [], 0, 0, True

    def finish(self, request: Request) -> None:
        """The next step's plan says so."""
        self._finished.append(request.request_id)

    def stored(self, request: Request, tokens: int) -> NDArray[np.uint32]:
        """The words of its first tokens: (layers, tokens, head slots)."""
        positions = np.arange(tokens)
        blocks = np.array(request.blocks)[positions // BLOCK_SIZE]
        return self.words[:, blocks, :, positions % BLOCK_SIZE].transpose(1, 0, 2)

    def receive(self, request: Request, source: "Engine", original: Request) -> None:
        """A handoff: every block of the prompt is copied, and all but the last token count as computed."""
        self.give_blocks(request, len(request.prompt))
        self.words[:, request.blocks] = source.words[:, original.blocks[: len(request.blocks)]]
        request.computed = len(request.prompt) - 1


def answer_of(prompt: NDArray[np.uint32], tokens: int) -> list[int]:
    """What an undisturbed engine answers."""
    engine, request = Engine(seed=99), Request("alone", prompt)
    engine.prefill(request)
    engine.decode(request, tokens - 1)
    return request.answer
