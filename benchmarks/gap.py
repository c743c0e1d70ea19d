"""Where does the first-token gap between pull and push open? `python -m benchmarks.gap --out DIR [PART ...]`

One factor at a time around a base point (prompts of 16k at 6 requests/s, fixed rate, 64 layers, four posting threads,
no link), and one map: utilisation of the prefill worker by time on the link. In each part vLLM's pull stands beside its
push and beside ours. A part is a comparison of `kvberth compare` in a folder of its own, `DIR/PART`: it can be stopped,
`--resume` goes on with the cells that are missing, and `kvberth report DIR/PART` shows it. `--dry-run` lists the parts.

The parts that are there make `DIR/gap.md` and `DIR/gap.svg`. All figures are of emulated engines: what a prefill, a
decode step and the link take is modelled; scheduler, connectors, descriptors and posting are real.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import msgspec
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvberth.compare import CompareSettings, Comparison, Folder, FolderError, Mode, begin, choose_trace, compare, load
from kvberth.compare import say_plan as say
from kvberth.compare.summary import CellSummary
from kvberth.emulator import load_profile
from kvberth.emulator.profile import Profile, dump_profile

PROFILE = "qwen3-32b-8xh200"
PROMPT_TOKENS, OUTPUT_TOKENS = 16384, 128
BASE_RATE = 6.0
RATES = (2.0, 4.0, 6.0, 7.0, 8.0)
LINKS_GBPS = (3200.0, 800.0, 400.0, 300.0)
LAYERS = (16, 32)
HITS = (0.5, 0.875)
BURSTS = (2, 4)
TWICE = 2.0
TIMES = (0.2, 0.5, 1, 2, 5, 10, 20, 50)

PULL_PUSH = (Mode.PUSH, Mode.VLLM_PULL, Mode.VLLM_PUSH)
INLINE = (Mode.PUSH, Mode.VLLM_PULL_INLINE, Mode.VLLM_PUSH_INLINE)
TRAFFIC = {"emulate": True, "prompts": (PROMPT_TOKENS,), "output_tokens": OUTPUT_TOKENS, "least_requests": 20}


@dataclass(frozen=True)
class Point:
    """One cell of a part: how many times as long as push's, vLLM's and ours, a first token of vLLM's pull takes."""

    part: str
    rate: float
    ttft_ms: tuple[float, float, float]
    over_vllm: tuple[float, float, float]
    over_ours: tuple[float, float, float]
    is_doubtful: bool

    @property
    def mark(self) -> str:
        """Behind a figure that shows the machine as well."""
        return "*" if self.is_doubtful else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="all if none is named")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="go on with parts that were begun")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true", help="list the parts, and how long each takes")
    arguments = parser.parse_args()
    parts = parts_of(arguments.out, arguments.repetitions)
    if unknown := set(arguments.parts) - set(parts):
        parser.error(f"{', '.join(sorted(unknown))}: no such part; there are {', '.join(parts)}")
    for name in arguments.parts or parts:
        print(f"{name}: {say(parts[name])}", flush=True)
        if not arguments.dry_run:
            measure(parts[name], Folder(arguments.out / name), resume=arguments.resume)
    if not arguments.dry_run:
        report(arguments.out, parts)


def parts_of(out: Path, repetitions: int = 1) -> dict[str, CompareSettings]:
    """Each part's comparison. The profiles and traces that differ from the shipped ones are written into `out`."""
    base = load_profile(PROFILE)
    common = TRAFFIC | {"model": PROFILE, "repetitions": repetitions, "modes": PULL_PUSH, "rates": (BASE_RATE,)}
    parts = {"base": common | {"rates": RATES}, "threads": common | {"rates": RATES, "modes": INLINE}}
    for layers in LAYERS:
        changed = msgspec.structs.replace(base, model=msgspec.structs.replace(base.model, layers=layers))
        parts[f"layers-{layers}"] = common | {"model": write_profile(out, f"layers-{layers}", changed)}
    for gbps in LINKS_GBPS:
        changed = msgspec.structs.replace(base, link=msgspec.structs.replace(base.link, bandwidth_gbps=gbps))
        model = write_profile(out, f"link-{gbps:g}", changed)
        parts[f"link-{gbps:g}"] = common | {"model": model, "rates": RATES, "emulate_link": True}
    for share in HITS:
        parts[f"hits-{share:.0%}".rstrip("%")] = common | {"prefix_share": share}
    parts["poisson"] = common | {"arrivals": "poisson"}
    for size in BURSTS:
        choice, _ = choose_trace(write_bursts(out, size), requests=burst_requests(size))
        parts[f"bursts-{size}"] = common | {"trace": choice, "arrivals": "trace", "prefix_caching": False}
    return {name: msgspec.convert(chosen, CompareSettings) for name, chosen in parts.items()}


def write_profile(out: Path, name: str, profile: Profile) -> str:
    """A profile under a name of its own; its path."""
    path = (out / "profiles" / f"{name}.toml").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump_profile(msgspec.structs.replace(profile, name=name)))
    return str(path)


def write_bursts(out: Path, size: int) -> Path:
    """A trace at the base rate in which `size` requests come at once."""
    path = out / "traces" / f"bursts-{size}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "timestamp": round(index // size * size / BASE_RATE, 6),
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
        }
        for index in range(burst_requests(size))
    ]
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return path


def burst_requests(size: int) -> int:
    """Ten seconds of whole bursts."""
    return round(10 * BASE_RATE / size) * size


def measure(settings: CompareSettings, folder: Folder, *, resume: bool) -> None:
    """What the folder lacks."""
    try:
        begin(settings, folder, resume=resume and folder.path.exists())
        compare(settings, folder, lambda progress: print(f"  {progress.doing}", flush=True))
    except FolderError as error:
        sys.exit(f"{error}")


def report(out: Path, parts: Mapping[str, CompareSettings]) -> None:
    """`gap.md` and `gap.svg` of the parts that are there."""
    points = [
        point
        for name, settings in parts.items()
        if (folder := Folder(out / name)).has_cells()
        for point in points_of(name, settings, load(folder))
    ]
    (out / "gap.md").write_text(to_markdown(points))
    draw(points).savefig(out / "gap.svg", metadata={"Date": None})
    print(f"{out / 'gap.md'}\n{out / 'gap.svg'}")


def points_of(part: str, settings: CompareSettings, comparison: Comparison) -> Iterator[Point]:
    """The cells in which all three modes were measured, and handed over."""
    ours, pull, push = settings.modes
    table = {
        (each.cell, each.mode, each.baseline): each
        for each in comparison.ratios
        if (each.metric, each.percentile) == ("ttft_ms", 50)
    }
    cells: dict[str, dict[str, CellSummary]] = {}
    for cell in comparison.cells:
        cells.setdefault(cell.cell, {})[cell.mode] = cell
    for name, modes in cells.items():
        figures = [modes[mode].ttft_ms for mode in settings.modes if mode in modes]
        if len(figures) < len(settings.modes) or None in figures:
            continue
        over_vllm, inverse = table[name, pull, push], table[name, ours, pull]
        yield Point(
            part,
            modes[pull].rate,
            tuple(each.p50 for each in figures if each is not None),
            (over_vllm.value, over_vllm.low, over_vllm.high),
            (1 / inverse.value, 1 / inverse.high, 1 / inverse.low),
            is_doubtful=any(cell.warnings or cell.has_lost_transfers for cell in modes.values()),
        )


def to_markdown(points: Sequence[Point]) -> str:
    """A row per cell."""
    lines = [
        "Emulated engines. TTFT p50 in ms; how many times push's it is, with 95% intervals. * less than 20% of the "
        "machine was idle, or transfers were lost.",
        "",
        "| part | requests/s | our push | vLLM push | vLLM pull | pull / vLLM's push | pull / our push |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for point in points:
        ours, pull, push = point.ttft_ms
        figures = [f"{each:.0f}" for each in (ours, push, pull)]
        figures += [f"{value:.2f} ({low:.2f} to {high:.2f})" for value, low, high in (point.over_vllm, point.over_ours)]
        lines.append(f"| {point.part} {point.mark} | {point.rate:g} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def draw(points: Sequence[Point]) -> Figure:
    """The map over vLLM's push and over ours, and the factors one at a time below."""
    with mpl.rc_context({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "kvberth"}):
        figure = Figure(figsize=(9, 7.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplot_mosaic([["vllm", "ours"], ["factors", "factors"]])
        draw_map(axes["vllm"], points, "vLLM's push", lambda point: point.over_vllm[0])
        draw_map(axes["ours"], points, "our push", lambda point: point.over_ours[0])
        at_base = [point for point in points if point.rate == BASE_RATE or point.part.startswith("bursts")]
        draw_factors(axes["factors"], at_base)
        starred = "; *: a busy machine, or lost transfers" if any(point.mark for point in points) else ""
        figure.suptitle(f"vLLM's pull: time to first token over push's, 16k prompts (emulated engines){starred}")
        return figure


def draw_map(axes: Axes, points: Sequence[Point], over: str, value: Callable[[Point], float]) -> None:
    """Utilisation by link time; what was not measured is empty, and twice as slow is framed."""
    names = ["base", *(f"link-{gbps:g}" for gbps in LINKS_GBPS)]
    found = {(point.part, point.rate): value(point) for point in points}
    marks = {(point.part, point.rate): point.mark for point in points}
    grid = [[found.get((name, rate), float("nan")) for rate in RATES] for name in names]
    axes.imshow(grid, cmap="Oranges", vmin=0.8, vmax=3.0, aspect="auto", origin="lower")
    for row, line in enumerate(grid):
        for column, each in enumerate(line):
            if each == each:  # noqa: PLR0124 - not a number
                weight = "bold" if each >= TWICE else "normal"
                text = f"{each:.2f}{marks[names[row], RATES[column]]}"
                axes.text(column, row, text, ha="center", va="center", fontweight=weight)
    axes.set_xticks(range(len(RATES)), [f"{utilisation(rate):.0%}\n{rate:g}/s" for rate in RATES])
    axes.set_yticks(range(len(names)), ["shared memory", *(f"{link_ms(gbps):.0f} ms" for gbps in LINKS_GBPS)])
    axes.set(xlabel="utilisation of the prefill worker", ylabel="a prompt's time on the link (modelled)")
    axes.set_title(f"over {over}; bold: twice and more")


def draw_factors(axes: Axes, points: Sequence[Point]) -> None:
    """One row per part, at the base rate."""
    for place, (label, marker) in enumerate((("over vLLM's push", "o"), ("over our push", "s"))):
        rows = [(row, (point.over_vllm, point.over_ours)[place]) for row, point in enumerate(points)]
        values = [value for _, (value, _, _) in rows]
        errors = [[value - low for _, (value, low, _) in rows], [high - value for _, (value, _, high) in rows]]
        axes.errorbar(values, [row + 0.15 * place for row, _ in rows], xerr=errors, fmt=marker, capsize=2, label=label)
    axes.axvline(TWICE, linestyle=":", color="gray")
    axes.axvline(1.0, color="lightgray")
    axes.set_yticks(range(len(points)), [f"{point.part} {point.mark}" for point in points])
    axes.set_ylim(len(points) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xticks(TIMES, [f"{each:g}" for each in TIMES])
    axes.minorticks_off()
    axes.set(xlabel="times push's time to first token (p50, 95% interval)")
    axes.set_title(f"one factor at a time, {BASE_RATE:g} requests/s")
    axes.legend()


def utilisation(rate: float) -> float:
    """Of the prefill worker, by the profile: what a prompt takes, alone in each of its steps, times the rate."""
    profile = load_profile(PROFILE)
    timing, steps = profile.timing, math.ceil(PROMPT_TOKENS / profile.engine.batched_tokens)
    pairs = PROMPT_TOKENS * (PROMPT_TOKENS - 1) / 2
    micros = timing.step_us * steps + timing.prompt_token_us * PROMPT_TOKENS + timing.prompt_pair_ps * 1e-6 * pairs
    return rate * micros * 1e-6


def link_ms(gbps: float) -> float:
    """What a prompt's KV takes on a link of its own."""
    return load_profile(PROFILE).true_token_bytes * PROMPT_TOKENS * 8 / gbps / 1e6


if __name__ == "__main__":
    main()
