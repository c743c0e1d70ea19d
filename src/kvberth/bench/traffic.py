"""Traffic that is made up: random prompts, shared prefixes, conversations. No I/O and no clock."""

import dataclasses
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvberth.bench.arrivals import Arrivals, arrival_seconds
from kvberth.bench.plan import Cancellation, Plan, PlannedRequest, TokenIds, draw_cancellations

__all__ = ["RandomTraffic", "Traffic", "random_token_ids"]

_TOKEN_ID_LIMIT = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic(ABC):
    """What every kind of traffic has.

    Attributes:
        requests, warmup: how many to measure, and how many to send before.
        rate: requests per second.
        token_range: token ids are drawn from [low, high).
        cancel_share: how many of the requests, from 0 to 1, are given up by their client: after a random number of
            tokens or, if `cancel_seconds` is given, at a random time within so many seconds.
        seed: the same settings and the same seed are the same traffic, whenever and wherever it is drawn.

    Raises:
        ValueError: one line that names the setting and what would be right.
    """

    requests: int = 100
    rate: float = 4.0
    token_range: tuple[int, int] = (1000, 20000)
    cancel_share: float = 0.0
    cancel_seconds: float | None = None
    warmup: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        self._at_least(requests=1, warmup=0, seed=0)
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate: must be above 0 requests per second, not {self.rate}")
        if not 0 <= self.cancel_share <= 1:
            raise ValueError(f"cancel_share: must be from 0 to 1, not {self.cancel_share}")
        if self.cancel_seconds is not None and not 0 < self.cancel_seconds < math.inf:
            raise ValueError(f"cancel_seconds: must be above 0 and finite, not {self.cancel_seconds}")
        low, high = self.token_range
        if not 0 <= low < high <= _TOKEN_ID_LIMIT:
            raise ValueError(f"token_range: must be LOW:HIGH with 0 <= LOW < HIGH, not {low}:{high}")

    @abstractmethod
    def plan(self) -> Plan:
        """Draw the traffic. The same settings give the same plan."""

    def settings(self) -> dict[str, Any]:
        """For the record of a result: all that the traffic depends on."""
        return dataclasses.asdict(self)

    def _at_least(self, **bounds: int) -> None:
        for name, bound in bounds.items():
            if (value := getattr(self, name)) < bound:
                raise ValueError(f"{name}: must be {bound} or more, not {value}")

    def _cancellations(self, seed: np.random.SeedSequence, output_tokens: Sequence[int]) -> list[Cancellation | None]:
        return draw_cancellations(seed, output_tokens, share=self.cancel_share, seconds=self.cancel_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomTraffic(Traffic):
    """Prompts of random token ids, all of one length and no two alike.

    Without prefixes and turns no prefix cache helps. Request i depends on `seed` and i only, not on `requests`. The
    gaps between arrivals are those of rate 1, scaled: the same seed at twice the rate is the same traffic in half the
    time.

    Attributes:
        arrivals: with turns, those of the conversations, at `rate / turns`: all in all `rate` requests per second.
        prompt_tokens, output_tokens: per request; with turns, what a turn adds.
        prefix_share: how much of a prompt, from 0 to below 1, is one of `prefixes` beginnings, chosen at random. Those
            of the warm-up have none of them.
        prefixes: how many different beginnings there are.
        turns: requests per conversation. A later turn is sent when the answer before it has ended, and its prompt is
            all that came before, that answer included, and `prompt_tokens` more.

    Raises:
        ValueError: one line that names the setting and what would be right.
    """

    arrivals: Arrivals = Arrivals.POISSON
    prompt_tokens: int = 1024
    output_tokens: int = 128
    prefix_share: float = 0.0
    prefixes: int = 1
    turns: int = 1

    def __post_init__(self) -> None:
        Traffic.__post_init__(self)  # a class with slots has no super() without arguments
        if self.arrivals not in (Arrivals.POISSON, Arrivals.UNIFORM):
            raise ValueError(f"arrivals: must be poisson or uniform, not {self.arrivals}")
        self._at_least(prompt_tokens=1, output_tokens=1, prefixes=1, turns=1)
        if not 0 <= self.prefix_share < 1:
            raise ValueError(f"prefix_share: must be 0 or more and below 1, not {self.prefix_share}")
        low, high = self.token_range
        own_tokens = self.prompt_tokens - self._prefix_tokens
        if own_tokens * math.log(high - low) < math.log(self.requests + self.warmup) - 1e-9:
            raise ValueError(
                f"token_range: {high - low} token ids make fewer than {self.requests + self.warmup} different prompts "
                f"of {own_tokens} tokens; give more ids or longer prompts"
            )

    def plan(self) -> Plan:
        """Draw the traffic. The same settings give the same plan."""
        seeds = np.random.SeedSequence(self.seed).spawn(5)
        arrivals_seed, prompts_seed, warmup_seed, prefixes_seed, cancel_seed = seeds
        conversations = -(-self.requests // self.turns)
        arrivals = arrival_seconds(self.arrivals, self.rate / self.turns, conversations, arrivals_seed)
        seen: set[bytes] = set()
        prompts = list(self._prompts(prompts_seed, self._beginnings(prefixes_seed), seen))
        cancellations = self._cancellations(cancel_seed, [self.output_tokens] * self.requests)
        requests = tuple(
            PlannedRequest(
                index,
                arrivals[index // self.turns],
                prompts[index],
                self.output_tokens,
                follows=index - 1 if index % self.turns else None,
                cancellation=cancellations[index],
            )
            for index in range(self.requests)
        )
        nothing = np.array([], dtype=np.int32)
        warmup = tuple(
            PlannedRequest(index, 0.0, prompt, self.output_tokens)
            for index, prompt in enumerate(self._prompts(warmup_seed, [nothing] * self.warmup, seen))
        )
        return Plan(requests, warmup)

    @property
    def _prefix_tokens(self) -> int:
        """At least one token of a prompt is its own."""
        return min(round(self.prompt_tokens * self.prefix_share), self.prompt_tokens - 1)

    def _beginnings(self, seed: np.random.SeedSequence) -> list[TokenIds]:
        """What each request's prompt begins with: one of the prefixes at the start of a conversation, else nothing."""
        choice_seed, ids_seed = seed.spawn(2)
        prefixes = [
            random_token_ids(child, self._prefix_tokens, self.token_range) for child in ids_seed.spawn(self.prefixes)
        ]
        choice = np.random.default_rng(choice_seed).integers(self.prefixes, size=self.requests)
        nothing = np.array([], dtype=np.int32)
        return [nothing if index % self.turns else prefixes[choice[index]] for index in range(self.requests)]

    def _prompts(
        self, seed: np.random.SeedSequence, beginnings: list[TokenIds], seen: set[bytes]
    ) -> Iterator[TokenIds]:
        """A prompt that is not in `seen` for each beginning, its own tokens from a generator of its own."""
        low, high = self.token_range
        for child, beginning in zip(seed.spawn(len(beginnings)), beginnings, strict=True):
            generator = np.random.default_rng(child)
            while True:
                own = generator.integers(low, high, size=self.prompt_tokens - len(beginning), dtype=np.int32)
                prompt = np.concatenate((beginning, own))
                digest = hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()
                if digest not in seen:
                    break
            seen.add(digest)
            prompt.setflags(write=False)
            yield prompt


def random_token_ids(seed: np.random.SeedSequence, count: int, token_range: tuple[int, int]) -> TokenIds:
    """`count` ids from a generator of their own; fewer from the same seed are the first of more. Read-only."""
    ids = np.random.default_rng(seed).integers(*token_range, size=count, dtype=np.int32)
    ids.setflags(write=False)
    return ids
