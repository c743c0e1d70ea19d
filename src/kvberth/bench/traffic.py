"""What is sent and when, decided before anything is sent. No I/O and no clock."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

__all__ = ["Arrivals", "Plan", "PlannedRequest", "RandomTraffic"]

TokenIds = npt.NDArray[np.int32]

_TOKEN_ID_LIMIT = 2**31


class Arrivals(StrEnum):
    """When requests come: with exponential gaps, as from many independent users, or at a fixed rate."""

    POISSON = "poisson"
    UNIFORM = "uniform"


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRequest:
    """One request to be sent.

    Attributes:
        index: its place in the plan, from 0.
        arrival_seconds: when to send it, from the start of the measurement.
        prompt_token_ids: the prompt, of shape (tokens,); read-only.
        output_tokens: how many tokens the answer must have.
    """

    index: int
    arrival_seconds: float
    prompt_token_ids: TokenIds
    output_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Traffic in the order of its arrival, and what is sent before it to warm the servers up."""

    requests: tuple[PlannedRequest, ...]
    warmup: tuple[PlannedRequest, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomTraffic:
    """Prompts of random token ids, all of one length and no two alike, so that no prefix cache helps.

    Request i depends on `seed` and i only, not on `requests`. The gaps between arrivals are those of rate 1, scaled:
    the same seed at twice the rate is the same traffic in half the time.

    Attributes:
        requests, warmup: how many to measure, and how many to send before.
        rate: requests per second.
        prompt_tokens, output_tokens: per request.
        token_range: token ids are drawn from [low, high).

    Raises:
        ValueError: one line that names the setting and what would be right.
    """

    requests: int = 100
    rate: float = 4.0
    arrivals: Arrivals = Arrivals.POISSON
    prompt_tokens: int = 1024
    output_tokens: int = 128
    token_range: tuple[int, int] = (1000, 20000)
    warmup: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("prompt_tokens", 1), ("output_tokens", 1), ("warmup", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: must be {least} or more, not {getattr(self, name)}")
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate: must be above 0 requests per second, not {self.rate}")
        if self.arrivals not in set(Arrivals):
            raise ValueError(f"arrivals: must be {' or '.join(Arrivals)}, not {self.arrivals}")
        low, high = self.token_range
        if not 0 <= low < high <= _TOKEN_ID_LIMIT:
            raise ValueError(f"token_range: must be LOW:HIGH with 0 <= LOW < HIGH, not {low}:{high}")
        needed = math.log(self.requests + self.warmup)
        if self.prompt_tokens * math.log(high - low) < needed - 1e-9:
            raise ValueError(
                f"token_range: {high - low} token ids make fewer than {self.requests + self.warmup} different prompts "
                f"of {self.prompt_tokens} tokens; give more ids or longer prompts"
            )

    def plan(self) -> Plan:
        """Draw the traffic. The same settings give the same plan."""
        arrivals_seed, prompts_seed, warmup_seed = np.random.SeedSequence(self.seed).spawn(3)
        seen: set[bytes] = set()
        prompts = self._prompts(prompts_seed, self.requests, seen)
        arrivals = self._arrival_seconds(arrivals_seed)
        requests = tuple(
            PlannedRequest(index, arrival, prompt, self.output_tokens)
            for index, (arrival, prompt) in enumerate(zip(arrivals, prompts, strict=True))
        )
        warmup = tuple(
            PlannedRequest(index, 0.0, prompt, self.output_tokens)
            for index, prompt in enumerate(self._prompts(warmup_seed, self.warmup, seen))
        )
        return Plan(requests, warmup)

    def _arrival_seconds(self, seed: np.random.SeedSequence) -> list[float]:
        """The first request comes at 0."""
        if self.arrivals == Arrivals.UNIFORM:
            return [index / self.rate for index in range(self.requests)]
        gaps = np.random.default_rng(seed).exponential(size=self.requests - 1)
        return [0.0, *(np.cumsum(gaps) / self.rate).tolist()]

    def _prompts(self, seed: np.random.SeedSequence, count: int, seen: set[bytes]) -> Iterator[TokenIds]:
        """`count` prompts that are not in `seen`, each from a generator of its own."""
        low, high = self.token_range
        for child in seed.spawn(count):
            generator = np.random.default_rng(child)
            while True:
                prompt = generator.integers(low, high, size=self.prompt_tokens, dtype=np.int32)
                digest = hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()
                if digest not in seen:
                    break
            seen.add(digest)
            prompt.setflags(write=False)
            yield prompt
