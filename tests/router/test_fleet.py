"""Who is there, who may be chosen, what is in flight."""

import pytest

from kvberth.router.breaker import BreakerState, Outcome
from kvberth.router.choice import DecodePolicy, PrefillPolicy, RequestFacts
from kvberth.router.engines import EngineInfo, Role, Source
from kvberth.router.fleet import Fleet
from kvberth.router.load import EngineLoad, Held

FACTS = RequestFacts(100, (1,))
P_INFO = EngineInfo(Role.PREFILL, "e1", "10.0.0.1", 14579, 2)
D_INFO = EngineInfo(Role.DECODE, "e2", "", 0, 1)


def ready_fleet(**settings):
    fleet = Fleet(**settings)
    for name, info in {"p0": P_INFO, "p1": P_INFO, "d0": D_INFO, "d1": D_INFO}.items():
        fleet.add(f"http://{name}", None, Source.SETTINGS).mark_ready(info)
    return fleet


def chosen(choice):
    return choice and choice.engine.url.removeprefix("http://")


def test_roles_are_what_engines_say():
    """Until an engine has said it, it is neither; it may say something else later."""
    fleet = Fleet()
    engine = fleet.add("http://e", None, Source.API)
    assert (fleet.in_role(None), fleet.prefill, fleet.decode) == ([engine], [], [])
    engine.mark_ready(P_INFO)
    assert (fleet.in_role(None), fleet.prefill, fleet.decode) == ([], [engine], [])
    engine.mark_unready("restarts")
    assert fleet.prefill == [engine]
    engine.mark_ready(D_INFO)
    assert (fleet.prefill, fleet.decode) == ([], [engine])


def test_a_url_is_one_engine():
    """Two entries for one engine would each know half of its load."""
    fleet = ready_fleet()
    with pytest.raises(ValueError, match="http://p0 is known"):
        fleet.add("http://p0", None, Source.API)


def test_equals_take_turns():
    """Engines with the same load are used in turn, however often somebody only asked."""
    fleet = ready_fleet()
    used = []
    for now in range(4):
        for choose in (fleet.choose_decode, fleet.choose_prefill):
            choose(RequestFacts(), now)
            choice = choose(RequestFacts(), now)
            fleet.leave(fleet.enter(choice.engine, RequestFacts(), now))
            used.append(chosen(choice))
    assert used == ["d0", "p0", "d1", "p1", "d0", "p0", "d1", "p1"]


def test_a_fleet_offers_ready_engines_that_are_not_excluded():
    """An engine that has not said who it is, or that failed this request, is not chosen."""
    fleet = ready_fleet()
    d0, d1 = fleet.decode
    assert chosen(fleet.choose_decode(FACTS, 0, [d0])) == "d1"
    d1.mark_unready("gone")
    assert fleet.choose_decode(FACTS, 0, [d0]) is None
    assert chosen(fleet.choose_decode(FACTS, 0)) == "d0"
    assert Fleet().choose_prefill(FACTS, 0) is None


def test_policies_are_those_that_were_asked_for():
    """Each role its own."""
    fleet = ready_fleet(prefill_policy=PrefillPolicy.ROUND_ROBIN, decode_policy=DecodePolicy.LEAST_LOADED)
    assert fleet.choose_prefill(FACTS, 0).reason == "its turn"
    assert fleet.choose_decode(FACTS, 0).reason == "fewest in flight, 0"


def test_what_is_in_flight_is_counted_with_its_tokens():
    """From `enter` to `leave`, and the prompt's beginning is remembered."""
    fleet = ready_fleet()
    engine = fleet.decode[0]
    visit = fleet.enter(engine, FACTS, 0)
    assert (engine.held, engine.prefixes.match(FACTS.prefixes)) == (Held(1, 100), 1)
    fleet.leave(visit)
    assert engine.held == Held(0, 0)


def test_beginnings_are_remembered_for_as_long_as_the_engine_may_have_them():
    """Eight of its KV caches, or without end where it does not say how much it holds."""
    fleet = ready_fleet()
    small, unknown = fleet.decode
    small.take_load(EngineLoad(0.0, Held(), 0, 0, kv_usage=0.0, kv_capacity_tokens=100))
    for engine in (small, unknown):
        for digest in range(20):
            fleet.leave(fleet.enter(engine, RequestFacts(100, (digest,)), 0))
    assert (len(small.prefixes), len(unknown.prefixes)) == (8, 20)


def test_a_request_sees_the_fleet_with_its_facts_and_the_time():
    """The rate of the queue policy and the breaker's pause need both."""
    fleet = ready_fleet()
    fleet.enter(fleet.prefill[1], FACTS, 0)
    fleet.leave(fleet.enter(fleet.prefill[0], RequestFacts(), 0))
    for visit in [fleet.enter(engine, FACTS, 0) for engine in fleet.prefill]:
        fleet.prefilled(visit, 1.0)
        fleet.leave(visit)
    now = [0.0]
    engines = fleet.for_request(FACTS, lambda: now[0])
    assert chosen(engines.choose_prefill()) == "p0"
    for _ in range(3):
        fleet.report(fleet.enter(fleet.prefill[0], FACTS, 0.0), Outcome.FAILURE, 0.0)
    assert chosen(engines.choose_prefill()) == "p1"
    assert engines.choose_prefill([fleet.prefill[1]]) is None
    now[0] = 1.0
    assert chosen(engines.choose_prefill([fleet.prefill[1]])) == "p0"
    assert chosen(engines.choose_decode([fleet.decode[0]])) == "d1"


def test_breaker_transitions_are_told():
    """Each once, and only when the state has changed."""
    told = []
    fleet = ready_fleet(on_breaker=lambda engine: told.append(engine.breaker.state))
    engine = fleet.decode[0]
    for now in range(3):
        fleet.report(fleet.enter(engine, FACTS, now), Outcome.FAILURE, now)
    assert chosen(fleet.choose_decode(FACTS, 2.5)) == "d1"
    fleet.report(fleet.enter(engine, FACTS, 9), Outcome.SUCCESS, 10)
    assert told == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]


def test_a_draining_engine_gets_nothing_new():
    """What it has goes on."""
    fleet = ready_fleet()
    engine = fleet.decode[0]
    visit = fleet.enter(engine, FACTS, 0)
    engine.is_draining = True
    assert fleet.choose_decode(FACTS, 0, [fleet.decode[1]]) is None
    fleet.leave(visit)
    assert fleet.find(engine.url) is engine


def test_a_removed_engine_is_forgotten_with_its_last_request():
    """And not before, so that its requests stay counted."""
    forgotten = []
    fleet = ready_fleet(on_forgotten=forgotten.append)
    engine, idle = fleet.decode
    visits = [fleet.enter(engine, FACTS, 0) for _ in range(2)]
    fleet.remove(engine)
    fleet.leave(visits[0])
    assert (fleet.find(engine.url), forgotten) == (engine, [])
    fleet.leave(visits[1])
    assert (fleet.find(engine.url), forgotten) == (None, [engine])
    fleet.remove(idle)
    assert (fleet.decode, forgotten) == ([], [engine, idle])


def test_a_removed_engine_is_kept_for_its_transfers():
    """Blocks that are read after its answer are there still."""
    fleet = ready_fleet()
    engine = fleet.prefill[0]
    visit = fleet.enter(engine, FACTS, 0)
    fleet.begin_transfer(engine)
    fleet.remove(engine)
    fleet.leave(visit)
    assert fleet.find(engine.url) is engine
    fleet.end_transfer(engine)
    assert fleet.find(engine.url) is None


def test_a_removed_engine_can_be_kept():
    """It is the same engine, with what is known of it."""
    fleet = ready_fleet()
    engine = fleet.decode[0]
    visit = fleet.enter(engine, FACTS, 0)
    fleet.remove(engine)
    fleet.keep(engine)
    fleet.leave(visit)
    assert fleet.find(engine.url) is engine
    assert engine.is_available(0)


def test_an_engine_that_was_drained_by_hand_stays_drained():
    """To keep it says nothing against that."""
    fleet = ready_fleet()
    engine = fleet.decode[0]
    engine.is_draining = True
    fleet.keep(engine)
    assert engine.is_draining
