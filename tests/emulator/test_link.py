"""The modelled wire: lines that are held one transfer after another, in a file that processes share."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvberth.emulator.link import LineTable, Wire

START = 1e6
"""Later than any machine's own clock: what a line is free since must not be its business. See the last test."""
GBPS = 8.0
MEGABYTE = 1_000_000
"""Takes a millisecond at this rate."""


class Clock:
    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Rig:
    """A wire on lines of its own, and a clock that the test turns."""

    def __init__(self, path: Path, *, latency_us: float = 0.0, scale: float = 1.0, start: float = START) -> None:
        self.clock, self.start = Clock(start), start
        self.lines = LineTable(path)
        self.wire = Wire(self.lines, GBPS, latency_us, scale, self.clock)

    def send(self, sender: str, receiver: str, size: int = MEGABYTE) -> float:
        """When it is complete, in milliseconds since the start."""
        return (self.wire.completion_time(sender, receiver, size) - self.start) * 1e3


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lines"


@pytest.fixture
def rig(path):
    rig = Rig(path)
    yield rig
    rig.lines.close()


def ms(value: float):
    return pytest.approx(value, abs=1e-5)


# One wire.


def test_a_transfer_takes_its_bytes_and_its_latency(path):
    """A megabyte at 8 Gbit/s is a millisecond; then 25 microseconds pass."""
    rig = Rig(path, latency_us=25.0)
    assert rig.send("p", "d") == ms(1.025)
    rig.clock.now += 1.0
    assert rig.send("p", "d", 3 * MEGABYTE) == ms(1000 + 3.025)


def test_the_scale_stands_for_the_true_bytes(path):
    """Of 512 true bytes one is copied."""
    assert Rig(path, scale=512.0).send("p", "d", 10_000) == ms(5.12)


def test_nothing_takes_the_latency(path):
    """A transfer without bytes holds no line."""
    rig = Rig(path, latency_us=25.0)
    assert rig.send("p", "d", 0) == ms(0.025)
    assert rig.send("p", "d") == ms(1.025)


def test_one_sender_s_transfers_take_turns(rig):
    """To whomever they go."""
    assert [rig.send("p", "d1"), rig.send("p", "d2"), rig.send("p", "d1")] == [ms(1), ms(2), ms(3)]


def test_transfers_to_one_receiver_take_turns(rig):
    """From whomever they come."""
    assert [rig.send("p1", "d"), rig.send("p2", "d"), rig.send("p1", "d")] == [ms(1), ms(2), ms(3)]


def test_opposite_directions_do_not_disturb_each_other(rig):
    """Full duplex: lines out and in are apart."""
    assert [rig.send("a", "b"), rig.send("b", "a")] == [ms(1), ms(1)]


def test_strangers_do_not_disturb_each_other(rig):
    """The switch is ideal."""
    assert [rig.send("p1", "d1"), rig.send("p2", "d2")] == [ms(1), ms(1)]


def test_latency_holds_no_line(path):
    """The next transfer begins behind the bytes."""
    rig = Rig(path, latency_us=500.0)
    assert [rig.send("p", "d"), rig.send("p", "d")] == [ms(1.5), ms(2.5)]


def test_an_idle_line_is_no_credit(rig):
    """A transfer begins when it is posted at the earliest."""
    rig.send("p", "d")
    rig.clock.now += 0.010
    assert rig.send("p", "d") == ms(11)


def test_who_waits_for_one_line_holds_the_other(rig):
    """A sender's line is held until its receiver's is free, and for the bytes then."""
    rig.send("p1", "d1", 5 * MEGABYTE)
    assert rig.send("p2", "d1") == ms(6)
    assert rig.send("p2", "d2") == ms(7)


TRANSFERS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from("abc"), st.integers(0, 10_000_000), st.floats(0, 0.01)),
    max_size=15,
)


@given(TRANSFERS)
def test_no_line_carries_two_transfers_at_once(tmp_path_factory, transfers):
    """Out of each agent and into each agent, whatever they send; and none begins before it is posted."""
    rig = Rig(tmp_path_factory.mktemp("lines") / "lines", start=START)
    held: dict[tuple[str, str], float] = {}
    for sender, receiver, size, wait in transfers:
        rig.clock.now += wait
        seconds = size / 1e9
        free_at = rig.lines.reserve(sender, receiver, seconds, rig.clock.now)
        lines = ("out", sender), ("in", receiver)
        assert free_at == pytest.approx(max(rig.clock.now, *(held.get(each, 0.0) for each in lines)) + seconds)
        held |= dict.fromkeys(lines, free_at)
    rig.lines.close()


# One file.


def test_two_tables_on_one_file_see_each_other(path):
    """As the engines of a machine do."""
    one, other = Rig(path), Rig(path)
    assert [one.send("p", "d1"), other.send("p", "d2"), one.send("p", "d1")] == [ms(1), ms(2), ms(3)]


def test_other_files_are_other_machines(tmp_path):
    """Nothing else is shared."""
    one, other = Rig(tmp_path / "one"), Rig(tmp_path / "other")
    assert [one.send("p", "d"), other.send("p", "d")] == [ms(1), ms(1)]


def test_what_is_reserved_stays_when_a_table_is_closed(path):
    """An engine that has ended leaves its peers' lines as they are."""
    first = Rig(path)
    first.send("p", "d")
    first.lines.close()
    assert Rig(path).send("p", "d") == ms(2)


PROGRAM = """
import sys
from pathlib import Path
from kvberth.emulator.link import LineTable
lines = LineTable(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[3])):
    lines.reserve("p", "d", 0.001, float(sys.argv[2]))
"""


def test_processes_reserve_one_after_another(path):
    """Three at once, thousands of times each: no reservation is lost."""
    rig, each = Rig(path), 5000
    command = [sys.executable, "-c", PROGRAM, str(path), str(START), str(each)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.close()
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    for process in processes:
        process.stdout.close()
    assert rig.send("p", "d") == pytest.approx(3 * each + 1, abs=0.1)


def test_the_default_file_is_the_user_s_own(tmp_path, monkeypatch):
    """In the temporary folder, and not for others to write."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lines = LineTable()
    assert lines.path.parent == tmp_path
    assert lines.path.stat().st_mode & 0o777 == 0o600
    lines.close()


# More agents than lines.


def test_the_longest_idle_line_is_taken_over(rig):
    """1,024 agents have lines; the next one takes that of the agent which has been idle for longest."""
    for number in range(512):
        rig.clock.now = START + number
        rig.send(f"p{number}", f"d{number}")
    rig.clock.now = START + 600
    rig.send("p0", "d0", 5 * MEGABYTE)
    # Of all others the lines of p1 and d1 have been idle for longest.
    assert rig.send("new sender", "d500") == ms(600_000 + 1)
    assert rig.send("p0", "d0") == ms(600_000 + 6)
    assert rig.send("new sender", "d499") == ms(600_000 + 2)


def test_new_agents_have_lines_of_their_own(rig):
    """A thousand of them: none is made to wait for another."""
    assert {rig.send(f"p{number}", f"d{number}") for number in range(500)} == {rig.send("p", "d")}


def test_an_agent_keeps_its_line(rig):
    """However many others come, as long as there are lines."""
    rig.send("p", "d")
    for number in range(400):
        rig.send(f"p{number}", f"d{number}")
    assert rig.send("p", "d") == ms(2)


@pytest.mark.parametrize("name", ["", "a" * 500, "ünïcödé", "p/0/0123456789abcdef"])
def test_any_name_is_an_agent(rig, name):
    """Long ones too; and it is the same agent the next time."""
    assert [rig.send(name, "d"), rig.send(name, "e")] == [ms(1), ms(2)]


def test_a_new_agent_s_transfer_begins_now(path):
    """Time is an argument."""
    assert Rig(path, start=1.0).send("p", "d") == ms(1)
