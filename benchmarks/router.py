"""What the router costs, beside vllm-router: `python -m benchmarks.router --out DIR`, seven minutes, two quiet cores.

Engines without a model, the client, and each router are processes of their own; a router has one core to itself,
engines and client share the others. The client asks the engines directly, through this router and through
vllm-router in turns, at the same pace. docs/router.md says how to read it.

`DIR/windows.jsonl` has a line per window, `DIR/requests.jsonl` one per request, `DIR/run.json` the machine, versions
and settings.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.router_figures import added_rows, cost_rows
from benchmarks.router_load import Mode
from benchmarks.router_rig import Rig
from rich.console import Console
from rich.table import Column, Table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the raw records")
    parser.add_argument("--vllm-router", default=shutil.which("vllm-router", path=_path()), help="its command")
    parser.add_argument("--ours", default=f"{sys.executable} -m kvberth", help="the kvberth command")
    parser.add_argument("--other", action="append", default=[], help="the command of another version, measured in turn")
    parser.add_argument("--modes", nargs="+", type=Mode, default=list(Mode), choices=list(Mode))
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 50, 200])
    parser.add_argument("--tokens", type=int, default=64, help="per request")
    parser.add_argument("--prefill-ms", type=float, default=50.0)
    parser.add_argument("--token-ms", type=float, default=25.0, help="between two tokens of a stream")
    parser.add_argument("--in-steps", action="store_true", help="all streams get their tokens at once")
    parser.add_argument("--prompt-bytes", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=5.0, help="per window, of them --ramp not counted")
    parser.add_argument("--ramp", type=float, default=1.5)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--hold", type=int, default=2000, help="streams to be held at once; 0: no such test")
    parser.add_argument("--router-cpu", type=int, default=min(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True)
    console = Console(width=max(200, Console().width))
    with Rig(arguments) as rig:
        rig.run()
    show_added(console, rig.windows)
    show_costs(console, rig.windows)
    show_held(console, rig.held)


def _path() -> str:
    """Commands of this environment come first, whether it is activated or not."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))


def show_added(console: Console, windows: Sequence[dict[str, Any]]) -> None:
    """Rows of a router are what it adds; those of `direct` are the times themselves."""
    table = Table(
        "streams",
        "mode",
        Column("who", no_wrap=True),
        Column("TTFT p50 (spread)", no_wrap=True),
        "p95",
        "p99",
        "token's delay p50",
        "p95",
        "p99",
        "ITL p50",
        "p99",
        "req/s",
        "tokens/s",
        "router's cores",
        "all other cores",
        "RSS, MB",
        "failed",
        title="Directly, ms, and what a router adds, ms",
    )
    for row in sorted(added_rows(windows), key=lambda row: (len(row["case"]), row["case"], row["mode"], row["target"])):
        low, high = row["ttft_ms_p50"][1:]
        table.add_row(
            row["case"],
            row["mode"],
            row["target"],
            f"{row['ttft_ms_p50'][0]:.2f} ({low:.2f} to {high:.2f})",
            *(_first(row, name) for name in ("ttft_ms_p95", "ttft_ms_p99")),
            *(_first(row, f"delay_ms_{quantile}") for quantile in ("p50", "p95", "p99")),
            *(_first(row, f"itl_ms_{quantile}") for quantile in ("p50", "p99")),
            f"{row['requests_per_second']:.0f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['cores']:.2f}",
            f"{row['others_cores']:.2f}",
            f"{row['rss_bytes'] / 1e6:.0f}",
            f"{row['failed']}",
        )
    console.print(table)


def _first(row: dict[str, Any], name: str) -> str:
    return f"{row[name][0]:.2f}" if name in row else ""


def show_costs(console: Console, windows: Sequence[dict[str, Any]]) -> None:
    table = Table("who", "mode", "per request, ms", "per 1,000 tokens, ms", title="CPU time of a router")
    for row in cost_rows(windows):
        per_request, per_thousand = row["cpu_seconds_per_request"], row["cpu_seconds_per_1000_tokens"]
        table.add_row(row["target"], row["mode"], f"{1e3 * per_request:.3f}", f"{1e3 * per_thousand:.1f}")
    console.print(table)


def show_held(console: Console, held: Sequence[dict[str, Any]]) -> None:
    if not held:
        return
    table = Table("who", "mode", "open at once", "failed", "kB per stream", "delay p99, ms", title="Streams held")
    for row in held:
        grown = row["router_rss_bytes"] - row["router_rss_before_bytes"]
        table.add_row(
            row["target"],
            row["mode"],
            f"{row['most_open']}",
            f"{sum(row['failures'].values())}",
            f"{grown / row['streams'] / 1e3:.1f}",
            f"{row['delay_ms']['p99']:.1f}" if "delay_ms" in row else "",
        )
    console.print(table)


if __name__ == "__main__":
    main()
