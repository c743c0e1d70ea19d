"""What an engine says of itself, and who is chosen."""

import pytest

from kvberth.router.engines import Engine, EngineInfo, Fleet, Role, least_loaded, parse_engine_info

INFO = EngineInfo(Role.PREFILL, "e1", "10.0.0.1", 14579, 2)


def info_line(engine_id="e1", role="kv_producer", **changes):
    labels = {"role": role, "engine_id": engine_id, "control_host": "10.0.0.1", "control_port": "14579", "tp_size": "2"}
    labels |= {"model_name": 'a "model"', "engine": "0"} | changes
    text = ",".join(
        name + '="' + value.replace('"', '\\"') + '"' for name, value in labels.items() if value is not None
    )
    return f"kvberth:engine_info{{{text}}} 1.0\n"


def test_engine_info_is_found_among_vllms_metrics():
    """One line of the page says who the engine is; label values may hold anything."""
    page = '# HELP vllm:x y\nvllm:x{engine="0"} 1.0\nbroken line that is not ours {\n' + info_line() + "vllm:z 2\n"
    assert parse_engine_info(page, Role.PREFILL) == INFO


def test_a_consumer_needs_no_control_address():
    """Only prefill workers listen."""
    page = info_line(role="kv_consumer", control_host=None, control_port=None)
    assert parse_engine_info(page, Role.DECODE) == EngineInfo(Role.DECODE, "e1", "", 0, 2)


def test_several_processes_of_one_engine_say_the_same():
    """Two lines with one engine id are one engine."""
    assert parse_engine_info(info_line() + info_line(pid="7"), Role.PREFILL) == INFO


@pytest.mark.parametrize(
    ("page", "expected", "problem"),
    [
        ("vllm:x 1\n", Role.PREFILL, "KVBerthConnector"),
        (info_line(role="kv_consumer"), Role.PREFILL, "is a kv_consumer, but is configured as a kv_producer"),
        (info_line(), Role.DECODE, "is a kv_producer, but is configured as a kv_consumer"),
        (info_line() + info_line("e2"), Role.PREFILL, "2 engines"),
        (info_line(tp_size=None), Role.PREFILL, "tp_size"),
        (info_line(control_port="many"), Role.PREFILL, "many"),
    ],
)
def test_what_is_wrong_is_said(page, expected, problem):
    """An operator reads what the engine said and what was expected."""
    with pytest.raises(ValueError, match=problem):
        parse_engine_info(page, expected)


def engines(*in_flight):
    return [Engine(f"http://e{i}", Role.DECODE, info=INFO, in_flight=load) for i, load in enumerate(in_flight)]


def test_the_least_loaded_engine_is_chosen():
    """Requests in flight decide."""
    some = engines(3, 1, 2)
    assert least_loaded(some) is some[1]


def test_nobody_is_chosen_from_nobody():
    """No engine is an answer, not an error."""
    assert least_loaded([]) is None


def ready_fleet():
    fleet = Fleet(["http://p0", "http://p1"], ["http://d0", "http://d1"])
    for engine in fleet.engines:
        engine.mark_ready(INFO)
    return fleet


def test_equals_take_turns():
    """Engines with the same load are used in turn, however often somebody only asked."""
    fleet = ready_fleet()
    used = []
    for _ in range(4):
        for choose in (fleet.choose_decode, fleet.choose_prefill):
            choose()
            engine = choose()
            fleet.enter(engine)
            fleet.leave(engine)
            used.append(engine.url.removeprefix("http://"))
    assert used == ["d0", "p0", "d1", "p1", "d0", "p0", "d1", "p1"]


def test_a_fleet_offers_ready_engines_that_are_not_excluded():
    """An engine that has not said who it is, or that failed this request, is not chosen."""
    fleet = ready_fleet()
    assert fleet.choose_decode([fleet.decode[0]]) is fleet.decode[1]
    fleet.decode[1].mark_unready("gone")
    assert fleet.choose_decode([fleet.decode[0]]) is None
    assert fleet.choose_decode() is fleet.decode[0]
    assert Fleet(["http://p"], ["http://d"]).choose_prefill() is None


def test_readiness_and_identity_go_together():
    """An engine that was away is a stranger, and the watch hears of it."""
    heard = []
    engine = Engine("http://e", Role.PREFILL, on_unready=lambda: heard.append(engine.problem))
    engine.mark_ready(INFO)
    assert (engine.is_ready, engine.problem) == (True, None)
    engine.mark_unready("gone")
    assert (engine.is_ready, engine.info, engine.problem, heard) == (False, None, "gone", ["gone"])
