"""An engine of known timing, simulated event by event, and runs of it as a client would record them."""

import dataclasses
from collections import deque

import msgspec
import numpy as np

from kvberth.emulator.calibrate import MeasuredRequest, MeasuredRun
from kvberth.emulator.profile import Timing
from kvberth.emulator.timing import Step, step_seconds

__all__ = ["TIMING", "Noise", "low_rates", "simulate", "traffic", "write_run"]

TIMING = Timing(step_us=5550.0, sequence_us=90.0, context_token_ns=6.83, prompt_token_us=4.99, prompt_pair_ps=168.0)

Traffic = list[tuple[float, int, int]]
"""(sent, prompt tokens, output tokens) of each request."""


@dataclasses.dataclass(frozen=True, slots=True)
class Noise:
    """What lies between an engine and the record of its client.

    Attributes:
        overhead_ms: from sending until the engine knows of it. jitter_ms: mean of an exponential delay of each token.
        late: share of tokens that come with the next one. merged: share that do so in one chunk.
        stalls: share of steps that take 20 ms longer.
    """

    overhead_ms: float = 0.0
    jitter_ms: float = 0.0
    late: float = 0.0
    merged: float = 0.0
    stalls: float = 0.0


@dataclasses.dataclass(slots=True, eq=False)
class _Sequence:
    sent: float
    prompt: int
    output: int
    computed: int = 0
    times: list[float] = dataclasses.field(default_factory=list)


def traffic(rate: float, requests: int, prompts: int | list[int], outputs: int = 64, seed: int = 0) -> Traffic:
    """Poisson arrivals; the prompts take turns."""
    lengths = [prompts] if isinstance(prompts, int) else prompts
    gaps = np.random.default_rng(seed).exponential(1 / rate, requests)
    return [(sent, lengths[index % len(lengths)], outputs) for index, sent in enumerate(np.cumsum(gaps).tolist())]


def low_rates(seed: int = 0) -> list[Traffic]:
    """Enough to tell all five figures: three lengths on an engine that is often idle, and one with batches."""
    return [
        traffic(1.0, 30, 512, seed=10 * seed),
        traffic(1.0, 30, 4096, seed=10 * seed + 1),
        traffic(1.0, 30, 16384, outputs=128, seed=10 * seed + 2),
        traffic(8.0, 90, 1024, outputs=128, seed=10 * seed + 3),
    ]


def simulate(
    requests: Traffic,
    timing: Timing = TIMING,
    noise: Noise = Noise(),
    *,
    batched_tokens: int = 8192,
    name: str = "run",
) -> MeasuredRun:
    """First come, first served; decoding first, and prompts in chunks of what is left of a step's tokens."""
    random = np.random.default_rng(len(requests))
    sequences = [_Sequence(*each) for each in sorted(requests)]
    arriving = deque(sequences)
    prefilling: deque[_Sequence] = deque()
    decoding: list[_Sequence] = []
    now = 0.0
    while arriving or prefilling or decoding:
        if not prefilling and not decoding:
            now = max(now, arriving[0].sent + noise.overhead_ms / 1e3)
        while arriving and arriving[0].sent + noise.overhead_ms / 1e3 <= now:
            prefilling.append(arriving.popleft())
        chunks = [(each.prompt + len(each.times) - 1, 1) for each in decoding]
        left = batched_tokens - len(chunks)
        emitting = list(decoding)
        while prefilling and left:
            sequence = prefilling[0]
            count = min(left, sequence.prompt - sequence.computed)
            chunks.append((sequence.computed, count))
            sequence.computed += count
            left -= count
            if sequence.computed < sequence.prompt:
                break
            emitting.append(prefilling.popleft())
        now += step_seconds(timing, Step.of(chunks)) + (0.02 if random.random() < noise.stalls else 0.0)
        for each in emitting:
            each.times.append(now)
        decoding = [each for each in emitting if len(each.times) < each.output]
    records = tuple(_record(each, noise, random) for each in sequences)
    return MeasuredRun(name=name, requests=records, started="2026-11-02T10:00:00+00:00")


def _record(sequence: _Sequence, noise: Noise, random: np.random.Generator) -> MeasuredRequest:
    times = np.array(sequence.times) + random.exponential(noise.jitter_ms / 1e3, len(sequence.times))
    times = np.maximum.accumulate(times)
    draws = random.random(len(times))
    draws[[0, -1]] = 1.0
    for index in np.flatnonzero(draws < noise.late):
        times[index] = times[index + 1]
    times = times[(draws < noise.late) | (draws >= noise.late + noise.merged)]
    ttft_ms = round((float(times[0]) - sequence.sent) * 1e3, 3)
    return MeasuredRequest(
        sent_s=round(sequence.sent, 6),
        prompt_tokens=sequence.prompt,
        output_tokens=sequence.output,
        status=200,
        ttft_ms=ttft_ms,
        itl_ms=np.round(np.diff(times) * 1e3, 3).tolist(),
    )


def write_run(folder, run: MeasuredRun, *, seed: int | None = None):
    """The run's files, as `kvberth bench --out` writes them; the summary only if there is a seed."""
    folder.mkdir()
    lines = [msgspec.json.encode(each) for each in run.requests]
    (folder / "requests.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    if seed is not None:
        environment = {"started": run.started, "url": "http://h:1", "traffic": {"seed": seed, "rate": 1.0}}
        (folder / "summary.json").write_bytes(msgspec.json.encode({"environment": environment, "summary": {}}))
    return folder
