"""What the emulator changes about NIXL: agents that rest, and transfers that take as long as the link says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nixl", reason="NIXL is not installed", exc_type=ImportError)

ROOT = Path(__file__).parents[2]
HOWS = ["array", "prepped"]
"""As our connector makes a transfer, and as vLLM's connectors do."""
WAYS = pytest.mark.parametrize("way", [f"{operation} {how}" for operation in ("WRITE", "READ") for how in HOWS])
LINK = {"seconds": 0.8, "latency": 0.05}
"""Three rows of sixteen take 0.15 seconds, and the latency."""
DUE = 0.2

pytestmark = pytest.mark.nixl


def run(folder: Path, name: str, **arguments: Any) -> Any:
    """One of `nixl_program`, with lines of its own in the folder."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.emulator.nixl_program", name, json.dumps(arguments)],
        cwd=ROOT,
        env={**os.environ, "UCX_TLS": "all", "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def program(tmp_path):
    """Run one: `program("rest", delay_us=0)`."""
    return lambda name, **arguments: run(tmp_path, name, **arguments)


@pytest.fixture(scope="module")
def moves_without_link(tmp_path_factory):
    """By way, with a notice each; a link that would take a minute."""
    return run(
        tmp_path_factory.mktemp("lines"),
        "moves",
        link=False,
        hows=[*HOWS, "list"],
        notice="done",
        seconds=30.0,
        latency=30.0,
    )


@pytest.fixture(scope="module")
def moves(tmp_path_factory):
    """By way, without a notice."""
    return run(tmp_path_factory.mktemp("lines"), "moves", link=True, hows=HOWS, notice="", **LINK)


@pytest.fixture(scope="module")
def moves_with_notice(tmp_path_factory):
    """By way, with one."""
    return run(tmp_path_factory.mktemp("lines"), "moves", link=True, hows=HOWS, notice="done", **LINK)


# Progress threads.


def test_an_idle_agent_rests(program):
    """With NIXL's default configuration: its progress thread looks a thousand times a second, and sleeps between."""
    assert program("rest", delay_us=1000) < 0.2


def test_no_rest_is_nixl_s_own(program):
    """Who asks for 0 gets what NIXL does by itself: a core for each agent, idle or not."""
    real = program("rest", delay_us=None)
    if real < 0.7:
        pytest.skip(f"this NIXL's idle agent takes {real:.2f} cores here")
    assert program("rest", delay_us=0) > real / 2


def test_it_is_done_once(program):
    """An engine that is made twice in a process does not wrap what is wrapped."""
    assert program("twice")


# Faults on demand.


@pytest.mark.parametrize(
    ("shares", "seen"),
    [
        ({"post": 1.0, "transfer": 0.0}, "nixlBackendError"),
        ({"post": 0.0, "transfer": 1.0}, "ERR"),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_faults_come_and_go_with_the_file(program, shares, seen, at_once):
    """The refusal to post and the error behind a transfer, how fast ever; neither when their share is 0 again."""
    assert program("faults", **shares, at_once=at_once) == [seen, "DONE"]


# Without the link.


@pytest.mark.parametrize("way", [*WAYS.args[1], "WRITE list", "READ list"])
def test_without_link_nothing_is_delayed(moves_without_link, way):
    """However slow the profile's link is: bytes move, and the notice comes at once."""
    seen = moves_without_link[way]
    assert seen["is_moved"]
    assert seen["done"][0] < 2.0
    ((text, arrived),) = seen["notices"]
    assert text == "done"
    assert arrived < 2.0


# With the link.


@WAYS
def test_a_transfer_takes_as_long_as_the_link_says(moves, way):
    """In progress until it is due, and done then, however it was made."""
    seen = moves[way]
    assert seen["state"] == "PROC"
    assert seen["is_moved"]
    assert DUE <= seen["done"][0] < DUE + 1.0
    assert seen["notices"] == []


@WAYS
def test_the_notice_comes_with_the_last_byte(moves_with_notice, way):
    """Once, not before the transfer is due, and the sender's state says done then."""
    seen = moves_with_notice[way]
    assert seen["is_moved"]
    ((text, arrived),) = seen["notices"]
    assert text == "done"
    assert DUE <= arrived < DUE + 1.0
    assert DUE <= seen["done"][0] < DUE + 1.0


def test_transfers_of_one_direction_take_turns(program):
    """Two go one behind the other; one in the other direction has its own line."""
    seen = program("turns", seconds=0.5)
    first, second, back = seen["done"]
    assert 0.5 <= first < 1.0 <= second < 2.0
    assert 0.5 <= back < 1.0
    assert [text for text, _ in seen["notices"]][-1] == "second"
    assert sorted(text for text, _ in seen["notices"]) == ["back", "first", "second"]


def test_a_handle_can_be_posted_again(program):
    """Each time takes its time, and has its own notice."""
    for seen, text in zip(program("again", seconds=0.3), ["first", "second"], strict=True):
        assert 0.3 <= seen["done"][0] < 1.0
        assert [each for each, _ in seen["notices"]] == [text]
        assert seen["notices"][0][1] >= 0.3


def test_ranks_share_the_engine_s_link(program):
    """Each of two has half of the bandwidth."""
    assert 0.2 <= program("ranks")["done"][0] < 0.7


def test_descriptors_may_come_from_a_list(program):
    """Tuples in place of an array: their bytes are counted all the same."""
    seen = program("moves", link=True, hows=["list"], notice="", **LINK)
    for way in ("WRITE list", "READ list"):
        assert seen[way]["is_moved"]
        assert DUE <= seen[way]["done"][0] < DUE + 1.0


def test_a_transfer_that_failed_has_no_notice(program):
    """NIXL sends it behind the last byte: a peer that hears it may use the blocks."""
    assert program("failed") == {"state": "ERR", "done": [], "notices": []}


def test_a_transfer_that_was_given_up_has_no_notice(program):
    """It was released before it was due: nobody asks for its state any more, and the peer hears nothing."""
    assert program("released") == {"notices": []}
