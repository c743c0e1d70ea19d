"""What the mover's benchmark computes from its records, and the memory it moves."""

import pytest

pytest.importorskip("kvberth.transport.nixl", reason="NIXL is not installed", exc_type=ImportError)

from benchmarks.mover import OTHER, OWN, PAIRS, posting_rows, step_rows, window_record
from benchmarks.mover_load import Load, Window, WindowResult
from benchmarks.mover_memory import Layout, Memory
from benchmarks.mover_posting import Order, Poster, merged_in_order


def posting_record(poster: Poster, order: Order, plan_ms: float, post_ms: float, descriptors: int) -> dict:
    return {
        "poster": poster,
        "layout": Layout.LAYER_MAJOR,
        "order": order,
        "page_bytes": 16,
        "descriptors": descriptors,
        "plan_ms": plan_ms,
        "post_ms": post_ms,
        "landed_ms": plan_ms + post_ms,
        "thread_cpu_ms": plan_ms + post_ms,
    }


def test_ratios_are_to_the_naive_connector_on_the_same_blocks():
    """Medians over the repetitions, of the sum of planning and posting."""
    records = [
        *(posting_record(Poster.NAIVE, Order.EQUAL, 1.0, post, 1000) for post in (99.0, 79.0, 500.0)),
        *(posting_record(Poster.FLIGHTS, Order.EQUAL, 2.0, post, 100) for post in (8.0, 3.0, 90.0)),
        posting_record(Poster.NAIVE, Order.FRAGMENTED, 1.0, 1.0, 1000),
    ]
    rows = posting_rows(records)
    (row,) = [row for row in rows if row["poster"] == Poster.FLIGHTS]
    assert row["cost_ms"] == 10.0
    assert row["cost_spread_ms"] == [5.0, 92.0]
    assert (row["descriptors_ratio"], row["cost_ratio"]) == (0.1, 0.1)


def window(load: Load, layout: Layout, where: str, repetition: int, ran_ms: float, blocked_ms: float) -> dict:
    count = 4
    engine = WindowResult(
        step_seconds=[(ran_ms + blocked_ms + 0.5) / 1e3] * count,
        ran_seconds=ran_ms * count / 1e3,
        core_wait_seconds=0.5 * count / 1e3,
    )
    tested = WindowResult(mover_cpu_seconds=0.2, took=2.0, ended=16)
    case = {"load": load, "layout": layout, "where": where, "repetition": repetition}
    return case | window_record(engine, tested)


def test_blocked_is_compared_with_the_window_beside_it():
    """A step that ran for longer is not blocked for longer; each repetition is compared with its own."""
    windows = [window(Load.NONE, Layout.BLOCK_MAJOR, "nothing moves", 1, 1.0, 4.0)]
    for repetition, blocked in ((1, 4.0), (2, 5.0)):
        for load, layout in PAIRS:
            windows.append(window(load, layout, OTHER, repetition, 1.0, blocked))
            windows.append(window(load, layout, OWN, repetition, 2.0, blocked + 0.11))
    own = [row for row in step_rows(windows) if row["where"] == OWN]
    assert len(own) == len(PAIRS)
    for row in own:
        assert row["blocked"] == pytest.approx([100 * 0.11 / 5.5, 100 * 0.11 / 6.5], abs=1e-6)
        assert row["longer"] == pytest.approx([100 * 1.11 / 5.5, 100 * 1.11 / 6.5], abs=0.05)
        assert (row["mover_cpu_percent"], row["transfers"], row["steps"]) == (pytest.approx(10.0), 32, 8)


def test_prepared_lists_merge_ascending_neighbours_only():
    """Whereas `plan_runs` sorts first."""
    assert merged_in_order(((1, 2, 3, 7), (4, 5, 9, 10))) == 3
    assert merged_in_order(((3, 2, 1), (3, 2, 1))) == 3


def test_both_ends_of_a_window_have_the_same_transfers():
    """As many as the rate asks for, evenly spaced, and none in a window without load."""
    one = Window(3, Load.PUSHES, Layout.BLOCK_MAJOR, starts=100.0, seconds=0.5, transfers_per_second=8.0)
    assert [(when, str(key)) for when, _, key in one.transfers()] == [
        (100.0, "3-0"),
        (100.125, "3-1"),
        (100.25, "3-2"),
        (100.375, "3-3"),
    ]
    assert list(Window(3, Load.NONE, Layout.BLOCK_MAJOR, 100.0, 0.5, 8.0).transfers()) == []


@pytest.mark.parametrize("layout", list(Layout))
def test_regions_name_the_pages(layout):
    """Every block of every layer has its own bytes, where the region says."""
    memory = Memory.make(layout, 3, 5, 64, seed=1)
    base = memory.pages.ctypes.data
    flat = memory.pages.reshape(-1)
    for block in range(5):
        there = b"".join(
            flat[at : at + region.block_length].tobytes()
            for region in memory.regions
            for at in [region.address - base + block * region.block_stride]
        )
        expected = memory.pages[:, block] if layout is Layout.LAYER_MAJOR else memory.pages[block]
        assert there == expected.tobytes()
    assert len({memory.checksum([block]) for block in range(5)}) == 5
    assert memory.checksum([1, 2]) != memory.checksum([2, 1])
