"""The connectors on the published grid, on emulated engines: `python benchmarks/emulated_grid.py --out DIR`

One prefill worker, one decode worker and the router for each kind of handoff; rates x prompt lengths, 128 output
tokens, prefix caching off. `DIR/KIND/RATE-PROMPT.jsonl` has a line per request, `DIR/cells.jsonl` a line per cell.
Figures of this machine's emulated engines; `kvberth bench` says what makes them doubtful, and so does the table.
"""

import argparse
import asyncio
import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvberth import bench
from kvberth.launch import ClusterSettings, Connector, LocalCluster

OUTPUT_TOKENS = 128
SECONDS = 12.0
LEAST_REQUESTS = 16


@dataclass(frozen=True)
class Kind:
    """A way to hand over. `inline` has NIXL post in the caller's thread, where vLLM's connectors use four others."""

    connector: Connector
    mode: str
    inline: bool = False


KINDS = {
    "kvberth-push": Kind(Connector.KVBERTH, "push"),
    "kvberth-pull": Kind(Connector.KVBERTH, "pull"),
    "vllm-pull": Kind(Connector.VLLM, "pull"),
    "vllm-push": Kind(Connector.VLLM, "push"),
    "vllm-pull-inline": Kind(Connector.VLLM, "pull", inline=True),
    "vllm-push-inline": Kind(Connector.VLLM, "push", inline=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", default="qwen3-32b-8xh200")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rates", nargs="+", type=float, default=[1, 2, 4, 8])
    parser.add_argument("--prompts", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--arrivals", choices=[str(each) for each in bench.Arrivals], default="uniform")
    parser.add_argument("--link", action="store_true", help="model the wire too")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of sending, per cell")
    parser.add_argument("--requests", type=int, help="per cell, in place of --seconds")
    arguments = parser.parse_args()
    cells: list[dict[str, Any]] = []
    for name in arguments.kinds:
        cells += measure(name, arguments)
    show(cells)


def measure(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    kind = KINDS[name]
    settings = ClusterSettings(
        model=arguments.profile,
        emulate=True,
        emulate_link=arguments.link,
        mode=kind.mode,
        connector=kind.connector,
        connector_config={"num_threads": 0} if kind.inline else {},
        prefix_caching=False,
    )
    folder = arguments.out / name
    folder.mkdir(parents=True, exist_ok=True)
    cells = []
    with LocalCluster(settings, Console(stderr=True)) as cluster:
        # Memory is fresh for one request only; it is the steady state that is measured.
        run(cluster, folder / "warm-up.jsonl", rate=4, prompt=4096, requests=20, arrivals="uniform")
        for prompt in arguments.prompts:
            for rate in arguments.rates:
                requests = arguments.requests or max(LEAST_REQUESTS, int(rate * arguments.seconds))
                before = counters(cluster)
                path = folder / f"{rate:g}-{prompt}.jsonl"
                result = run(cluster, path, rate=rate, prompt=prompt, requests=requests, arrivals=arguments.arrivals)
                after = counters(cluster)
                cell = {"kind": name, "rate": rate, "prompt_tokens": prompt, "arrivals": arguments.arrivals}
                cell |= bench_figures(result.summary)
                cell |= {key: after[key] - before.get(key, 0.0) for key in after}
                cells.append(cell)
                with (arguments.out / "cells.jsonl").open("a") as file:
                    file.write(json.dumps(cell) + "\n")
                print(json.dumps(cell), flush=True)
    return cells


def run(
    cluster: LocalCluster, path: Path, *, rate: float, prompt: int, requests: int, arrivals: str
) -> bench.RunResult:
    plan = bench.RandomTraffic(
        requests=requests,
        rate=rate,
        arrivals=bench.Arrivals(arrivals),
        prompt_tokens=prompt,
        output_tokens=OUTPUT_TOKENS,
        warmup=2,
        seed=1,
    ).plan()
    result = asyncio.run(bench.run(plan, bench.Target(url=cluster.router_url)))
    bench.write_records(path, result.records)
    return result


def bench_figures(summary: bench.Summary) -> dict[str, Any]:
    figures: dict[str, Any] = {"requests": summary.requests, "failed": summary.failed}
    for name in ("ttft_ms", "tpot_ms", "itl_ms"):
        percentiles = getattr(summary, name)
        if percentiles is not None:
            figures[name] = {key: round(getattr(percentiles, key), 2) for key in ("p50", "p95", "p99")}
    return figures | {"idle_share": summary.idle_share, "warnings": summary.warnings}


def counters(cluster: LocalCluster) -> dict[str, float]:
    """What the engines count, summed over both."""
    wanted = {
        "kvberth:emulator_corruptions_total": "corruptions",
        "kvberth:emulator_late_seconds_total": "late_seconds",
        "kvberth:transfer_descriptors_sum": "descriptors",
        "vllm:nixl_num_descriptors_sum": "descriptors",
        "vllm:nixl_post_time_seconds_sum": "post_seconds",
    }
    sums = dict.fromkeys(wanted.values(), 0.0)
    for engine in cluster.engines:
        with urllib.request.urlopen(f"{engine.url}/metrics", timeout=10) as answer:  # noqa: S310 - our own URL
            text = answer.read().decode()
        for line in text.splitlines():
            name, _, rest = line.partition("{")
            # Both sides of a transfer count its descriptors; ours say so on either, vLLM's only on one.
            if name in wanted and 'role="producer"' not in rest:
                sums[wanted[name]] += float(rest.rpartition(" ")[2])
    return sums


def show(cells: list[dict[str, Any]]) -> None:
    table = Table("kind", "prompt @ rate", "TTFT p50 / p95", "TPOT p50 / p95", "descriptors", "idle", "corruptions")
    for cell in cells:
        ttft, tpot = cell["ttft_ms"], cell["tpot_ms"]
        table.add_row(
            cell["kind"],
            f"{cell['prompt_tokens']} @ {cell['rate']:g}",
            f"{ttft['p50']:.0f} / {ttft['p95']:.0f}",
            f"{tpot['p50']:.2f} / {tpot['p95']:.2f}",
            f"{cell['descriptors'] / (cell['requests'] + 2):.0f}",
            f"{cell['idle_share']:.0%}",
            f"{cell['corruptions']:.0f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
