"""A drill's verdict, with a cluster that is a small server with faults of its own."""

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest
from aiohttp import web

from kvberth.drills import runner
from kvberth.drills.catalogue import Drill
from kvberth.drills.cluster import ENGINES
from kvberth.drills.health import HealthSample
from kvberth.drills.judge import Outcome
from kvberth.drills.results import DrillRow
from kvberth.drills.states import EngineState, ProcessState
from kvberth.drills.traffic import TrafficShape
from kvberth.emulator.answers import answer_text
from kvberth.launch import LaunchError


class FakeCluster:
    """Answers rightly; its attributes make it worse."""

    def __init__(self) -> None:
        self.is_wrong = self.is_refusing = self.is_away = self.is_alone = False
        self.held = self.corruptions = self.failed_handoffs = 0
        self.files = 100
        self.unusable: set[str] = set()
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if self.is_refusing:
            return web.json_response({"error": {"message": "no decode worker"}}, status=503)
        self.failed_handoffs += self.is_alone
        text = answer_text(asked["prompt"], asked["max_tokens"])
        text = text.upper() if self.is_wrong else text
        if not asked["stream"]:
            return web.json_response({"choices": [{"text": text}]})
        chunk = json.dumps({"choices": [{"text": text}]})
        return web.Response(text=f"data: {chunk}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    def engine_states(self) -> dict[str, EngineState]:
        return {name: EngineState(self.held, 0, 0, self.corruptions, self.failed_handoffs) for name in ENGINES}

    def process_states(self) -> dict[str, ProcessState]:
        return {name: ProcessState(1, 10, self.files, 1 << 20) for name in ENGINES}

    def health(self, at: float) -> HealthSample:
        return HealthSample(at, {name: name not in self.unusable for name in ENGINES})

    def await_ready(self, name: str) -> None:
        if self.is_away:
            raise LaunchError(f"{name} is not ready")


class FakeFault:
    """Sets an attribute, and sets it back if it is to be undone."""

    trace = "attributes"

    def __init__(self, name: str, during: object, afterwards: object) -> None:
        self.name, self.during, self.afterwards = name, during, afterwards
        self.is_ended = False
        self.felt = 1

    def begin(self, cluster: FakeCluster) -> None:
        setattr(cluster, self.name, self.during)

    def end(self, cluster: FakeCluster) -> None:
        self.is_ended = True
        setattr(cluster, self.name, self.afterwards)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Served by a thread."""
    fake, loop, ready = FakeCluster(), asyncio.new_event_loop(), threading.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", fake.answer)
        server = web.AppRunner(app)
        await server.setup()
        site = web.TCPSite(server, "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{server.addresses[0][1]}"
        ready.set()
        await asyncio.to_thread(stop.wait)
        await server.cleanup()

    stop = threading.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    yield fake
    stop.set()
    thread.join()
    loop.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """No waiting for what does not come here."""
    for name, seconds in (
        ("_BEFORE_SECONDS", (0.1, 0.2)),
        ("_UNAWARE_SECONDS", (0.1, 0.2)),
        ("_AFTER_SECONDS", 0.3),
        ("_REACTION_SECONDS", 0.1),
        ("_MENDING_SECONDS", 0.5),
        ("_LOOK_SECONDS", 0.02),
        ("_QUIET_SECONDS", 0.0),
        ("_WHOLE_SECONDS", 0.2),
    ):
        monkeypatch.setattr(runner, name, seconds)


def run(cluster: FakeCluster, fault: FakeFault, **changes: object) -> DrillRow:
    """A drill of half a second."""
    shape = TrafficShape(rate=60.0, prompt_tokens=(5, 40), output_tokens=(3,))
    settings: dict[str, object] = {"hold_seconds": 0.3, "settle_seconds": 0.1, "traffic": shape} | changes
    drill = Drill(name="test", what="a test", fault=lambda _, __: fault, **settings)  # type: ignore[arg-type]
    baseline = cluster.process_states()
    return asyncio.run(runner.run_drill(cluster, drill, seed=1, number=1, baseline=baseline))  # type: ignore[arg-type]


NO_FAULT = ("is_wrong", False, False)


def test_calm_cluster_passes(cluster):
    """Every request is counted, and right."""
    row = run(cluster, FakeFault(*NO_FAULT))
    assert row.problems == []
    assert row.requests == row.right > 20
    assert (row.felt, row.trace) == (1, "attributes")
    assert row.seconds > row.began_seconds


def test_a_fault_that_has_touched_nothing_fails_the_drill(cluster):
    """Nothing has been survived then."""
    fault = FakeFault(*NO_FAULT)
    fault.felt = 0
    assert run(cluster, fault).problems == ["the fault was not felt: no attributes"]


def test_a_fault_that_is_noticed_ends_soon(cluster):
    """It need not last as long as it may."""
    row = run(
        cluster,
        FakeFault("unusable", {"decode-1"}, set()),
        victims=(("decode-1",),),
        is_down=True,
        notice_seconds=5.0,
        hold_seconds=60.0,
    )
    assert row.problems == []
    assert row.seconds < 60


def test_wrong_answers_fail_the_drill(cluster):
    """Only while the fault lasts."""
    row = run(cluster, FakeFault("is_wrong", True, False))
    assert 0 < row.wrong < row.requests
    assert len(row.problems) == row.wrong
    assert "wrong: differs from character" in row.problems[0]


@pytest.mark.parametrize("excused", [frozenset(), frozenset({Outcome.REFUSED})])
def test_refusals_fail_the_drill_unless_they_are_excused(cluster, excused):
    """They are counted in any case."""
    row = run(cluster, FakeFault("is_refusing", True, False), excused=excused)
    assert row.refused > 0
    assert len(row.problems) == (0 if excused else row.refused)


def test_what_does_not_serve_afterwards_fails_the_drill(cluster):
    """A fault that has been undone excuses nothing."""
    row = run(cluster, FakeFault("is_refusing", False, True), excused=frozenset({Outcome.REFUSED}))
    assert row.problems
    assert all(" refused: 503" in each for each in row.problems)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (("held", 5, 5), "prefill-0 holds 5 blocks (0 leased) and 0 requests"),
        (("corruptions", 1, 1), "4 KV contexts held wrong words"),
        (("files", 200, 200), "prefill-0 had 100 open files before, and has 200"),
        (("unusable", {"decode-1"}, set()), "/health called decode-1 unusable at"),
    ],
)
def test_what_is_left_behind_fails_the_drill(cluster, fault, problem):
    """Blocks, corruptions, files, and a `/health` that calls a living engine dead."""
    row = run(cluster, FakeFault(*fault))
    assert row.requests == row.right
    assert any(each.startswith(problem) for each in row.problems)


def test_decode_workers_that_stay_alone_fail_the_drill(cluster):
    """They are, during the fault, and may be; not any more when it is over."""
    assert run(cluster, FakeFault("is_alone", True, False)).problems == []
    row = run(cluster, FakeFault("is_alone", False, True))
    assert row.requests == row.right
    assert any(each.endswith("handoffs to decode-0 failed although all was well again") for each in row.problems)


def test_handoffs_may_fail_for_a_while_where_messages_were_lost(cluster):
    """TCP waits before it sends again, and engines for answers. Nothing else has an excuse."""

    class SlowlyMended(FakeFault):
        def end(self, cluster: FakeCluster) -> None:
            self.mending = threading.Timer(0.3, super().end, (cluster,))
            self.mending.start()

    for changes, is_excused in (({"needs_network": True}, True), ({"settle_seconds": 25.0}, True), ({}, False)):
        fault = SlowlyMended("is_alone", True, False)
        row = run(cluster, fault, **changes)
        fault.mending.join()
        assert (row.problems == []) is is_excused


def test_engine_that_is_down_must_be_called_so(cluster):
    """Here nobody notices."""
    row = run(cluster, FakeFault(*NO_FAULT), victims=(("decode-1",),), is_down=True, notice_seconds=0.1)
    (problem,) = row.problems
    assert problem.startswith("/health still called decode-1 usable at")


def test_the_same_seed_hits_at_the_same_moment(cluster):
    """To do again what went wrong."""
    one, two = (run(cluster, FakeFault(*NO_FAULT)) for _ in range(2))
    assert one.began_seconds == pytest.approx(two.began_seconds, abs=0.05)


@pytest.mark.parametrize("fault", [("is_away", True, True), ("unusable", {"decode-1"}, {"decode-1"})])
def test_cluster_that_is_not_whole_again_ends_the_run(cluster, fault):
    """The next drill would find fault with what this one left."""
    with pytest.raises(LaunchError):
        run(cluster, FakeFault(*fault), victims=(("decode-1",),), is_down=True)


def test_a_fault_is_undone_even_if_it_fails_to_begin(cluster):
    """Half of a fault would stay."""

    class Half(FakeFault):
        def begin(self, cluster):
            raise OSError("no such device")

    fault = Half(*NO_FAULT)
    with pytest.raises(OSError, match="no such device"):
        run(cluster, fault)
    assert fault.is_ended
