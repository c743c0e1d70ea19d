"""What is sent during a drill, decided before anything is sent, with the answer that each request is owed. No I/O.

Open loop: requests come at their times, whatever has become of those before.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kvberth.emulator.answers import answer_text

__all__ = ["DrillRequest", "TrafficShape", "first_seconds", "plan_traffic"]

_BINDINGS = ("early", "jit", "late", "auto")
_TOKENS = (1000, 20000)
"""Token ids of prompts are drawn from here, as everywhere in our tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficShape:
    """Of what kind the requests of a drill are.

    Attributes:
        rate: requests per second, at exponential gaps.
        prompt_tokens, output_tokens: one of these each, by chance.
        streamed: share of the requests that are streamed.
        pull: share of those that go by pull, where push is the cluster's mode.
        leaving: share of the clients that go away within a second.
        deadline_seconds: within which each request must have ended, with an answer or an error.
    """

    rate: float = 5.0
    prompt_tokens: tuple[int, ...] = (60, 500, 1500, 4000)
    output_tokens: tuple[int, ...] = (8, 100, 400)
    streamed: float = 0.6
    pull: float = 0.25
    leaving: float = 0.0
    deadline_seconds: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillRequest:
    """One request, and what it is owed.

    Attributes:
        index: its place in the plan, from 0.
        arrival_seconds: when to send it, from the start of the traffic.
        mode: `push` or `pull`.
        binding: when its decode worker is to be chosen, if it is pushed: each way as often.
        leaves_after_seconds: when its client goes away; None stays.
        answer: the whole text.
    """

    index: int
    arrival_seconds: float
    prompt: tuple[int, ...]
    output_tokens: int
    is_streamed: bool
    mode: str
    binding: str
    leaves_after_seconds: float | None
    deadline_seconds: float
    answer: str


def plan_traffic(shape: TrafficShape, seed: int) -> Iterator[DrillRequest]:
    """Requests without end. The same arguments give the same ones."""
    chance = np.random.default_rng(seed)
    arrival = 0.0
    for index in itertools.count():
        prompt = tuple(chance.integers(*_TOKENS, int(chance.choice(shape.prompt_tokens))).tolist())
        output_tokens = int(chance.choice(shape.output_tokens))
        yield DrillRequest(
            index=index,
            arrival_seconds=arrival,
            prompt=prompt,
            output_tokens=output_tokens,
            is_streamed=bool(chance.random() < shape.streamed),
            mode="pull" if chance.random() < shape.pull else "push",
            binding=str(chance.choice(_BINDINGS)),
            leaves_after_seconds=float(chance.random()) if chance.random() < shape.leaving else None,
            deadline_seconds=shape.deadline_seconds,
            answer=answer_text(prompt, output_tokens),
        )
        arrival += float(chance.exponential(1 / shape.rate))


def first_seconds(seconds: float, requests: Iterable[DrillRequest]) -> Iterator[DrillRequest]:
    """Those that arrive within so many seconds."""
    return itertools.takewhile(lambda each: each.arrival_seconds < seconds, requests)
