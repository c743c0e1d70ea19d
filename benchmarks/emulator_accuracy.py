"""Does an emulated engine keep its profile's pace? `python benchmarks/emulator_accuracy.py [--profile NAME]`

One undivided engine, without prefix caching. Three figures, each beside what the profile says: time per output token
with 1 and with 16 sequences (median gap while all of them decode), and the prefill of 16,384 tokens (by the engine's
own histogram, from the first step to the first token).
"""

import argparse
import asyncio
import statistics

from rich.console import Console
from rich.table import Table

from kvberth import bench
from kvberth.emulator import Profile, load_profile
from kvberth.emulator.timing import Step, step_seconds
from kvberth.launch import ClusterSettings, LocalCluster
from kvberth.launch.metrics import EngineMetrics

PROMPT_TOKENS = 1024
OUTPUT_TOKENS = 256
LONG_PROMPT_TOKENS = 16384
ALL_AT_ONCE = 1e4
"""Requests per second."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="qwen3-32b-8xh200")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    profile = load_profile(arguments.profile)
    settings = ClusterSettings(
        model=arguments.profile, emulate=True, prefill=0, decode=0, undivided=1, prefix_caching=False
    )
    table = Table("figure", "profile, ms", "measured, ms", "deviation", "spread of repetitions, ms")
    with LocalCluster(settings, Console(stderr=True)) as cluster:
        url = cluster.undivided[0].url
        for sequences in (1, 16):
            measured = [decode_gap(url, sequences, seed) for seed in range(arguments.repeat)]
            add(table, f"output token, batch {sequences}", decode_ms(profile, sequences), measured)
        measured = [prefill_ms(url, seed) for seed in range(arguments.repeat)]
        add(table, f"prefill of {LONG_PROMPT_TOKENS:,} tokens", profile_prefill_ms(profile), measured)
    Console().print(table)


def add(table: Table, name: str, expected: float, measured: list[float]) -> None:
    median = statistics.median(measured)
    spread = f"{min(measured):.2f} to {max(measured):.2f}"
    table.add_row(name, f"{expected:.2f}", f"{median:.2f}", f"{median / expected - 1:+.1%}", spread)


def decode_ms(profile: Profile, sequences: int) -> float:
    context = sequences * (PROMPT_TOKENS + OUTPUT_TOKENS / 2)
    return 1e3 * step_seconds(profile.timing, Step(sequences=sequences, context_tokens=int(context)))


def profile_prefill_ms(profile: Profile) -> float:
    chunk = profile.engine.batched_tokens
    chunks = [(begin, min(chunk, LONG_PROMPT_TOKENS - begin)) for begin in range(0, LONG_PROMPT_TOKENS, chunk)]
    return 1e3 * sum(step_seconds(profile.timing, Step.of([each])) for each in chunks)


def decode_gap(url: str, sequences: int, seed: int) -> float:
    """The median gap between tokens while all sequences decode."""
    result = run(url, sequences, PROMPT_TOKENS, OUTPUT_TOKENS, seed)
    begin = max(record.sent_s * 1e3 + (record.ttft_ms or 0) for record in result.records)
    end = min(record.sent_s * 1e3 + (record.e2e_ms or 0) for record in result.records)
    gaps = []
    for record in result.records:
        moment = record.sent_s * 1e3 + (record.ttft_ms or 0)
        for gap in record.itl_ms:
            moment += gap
            if begin < moment - gap and moment < end:
                gaps.append(gap)
    return statistics.mean(gaps)


def prefill_ms(url: str, seed: int) -> float:
    """The engine's own time from the first step of a prompt to its first token."""
    metrics = EngineMetrics(url)
    name = "vllm:request_prefill_time_seconds"
    before = metrics.value(f"{name}_sum"), metrics.value(f"{name}_count")
    run(url, 1, LONG_PROMPT_TOKENS, 1, seed)
    after = metrics.value(f"{name}_sum"), metrics.value(f"{name}_count")
    return 1e3 * (after[0] - before[0]) / (after[1] - before[1])


def run(url: str, requests: int, prompt_tokens: int, output_tokens: int, seed: int) -> bench.RunResult:
    plan = bench.RandomTraffic(
        requests=requests,
        rate=ALL_AT_ONCE,
        arrivals=bench.Arrivals.UNIFORM,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        warmup=0,
        seed=seed,
    ).plan()
    result = asyncio.run(bench.run(plan, bench.Target(url=url)))
    if result.summary.failed:
        raise SystemExit(f"requests failed: {result.summary.failures}")
    return result


if __name__ == "__main__":
    main()
