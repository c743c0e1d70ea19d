"""What an engine says of itself, and what is known of it."""

import pytest

from kvberth.router.breaker import Outcome
from kvberth.router.engines import Engine, EngineInfo, Role, engine_url, parse_engine_info
from kvberth.router.load import EngineLoad, Held

INFO = EngineInfo(Role.PREFILL, "e1", "10.0.0.1", 14579, 2)


def info_line(engine_id="e1", role="kv_producer", **changes):
    labels = {"role": role, "engine_id": engine_id, "control_host": "10.0.0.1", "control_port": "14579", "tp_size": "2"}
    labels |= {"protocol_version": "1", "model_name": 'a "model"', "engine": "0"} | changes
    text = ",".join(
        name + '="' + value.replace('"', '\\"') + '"' for name, value in labels.items() if value is not None
    )
    return f"kvberth:engine_info{{{text}}} 1.0\n"


def test_engine_info_is_found_among_vllms_metrics():
    """One line of the page says who the engine is; label values may hold anything."""
    page = '# HELP vllm:x y\nvllm:x{engine="0"} 1.0\nbroken line that is not ours {\n' + info_line() + "vllm:z 2\n"
    assert parse_engine_info(page, Role.PREFILL) == INFO


@pytest.mark.parametrize("role", Role)
def test_without_an_assertion_the_role_is_what_the_engine_says(role):
    """One URL is enough."""
    assert parse_engine_info(info_line(role=role)).role is role


def test_a_consumer_needs_no_control_address():
    """Only prefill workers listen."""
    page = info_line(role="kv_consumer", control_host=None, control_port=None)
    assert parse_engine_info(page, Role.DECODE) == EngineInfo(Role.DECODE, "e1", "", 0, 2)


def test_another_connector_says_no_version_of_our_protocol():
    """So nothing is said to it on its control address."""
    assert parse_engine_info(info_line()).hears_router
    assert not parse_engine_info(info_line(protocol_version=None)).hears_router


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
        (info_line(role="kv_both"), None, "is a kv_both, but must be one of kv_producer, kv_consumer"),
    ],
)
def test_what_is_wrong_is_said(page, expected, problem):
    """An operator reads what the engine said and what was expected."""
    with pytest.raises(ValueError, match=problem):
        parse_engine_info(page, expected)


def test_readiness_and_identity_go_together():
    """An engine that was away is a stranger, and the watch hears of it."""
    heard = []
    engine = Engine("http://e", Role.PREFILL, on_unready=lambda: heard.append(engine.problem))
    engine.mark_ready(INFO)
    assert (engine.is_ready, engine.problem) == (True, None)
    engine.mark_unready("gone")
    assert (engine.is_ready, engine.info, engine.problem, heard) == (False, None, "gone", ["gone"])


def test_what_was_learnt_goes_with_the_engine():
    """Another engine behind the same URL has another cache, rate and health; the same one after a pause has not."""
    engine = Engine("http://e")
    engine.mark_ready(INFO)
    engine.prefixes.remember([b"x"])
    engine.rate.add(10, started_at=0, ended_at=1)
    engine.breaker.report(Outcome.FAILURE, 0, is_probe=False)
    engine.mark_unready("pause")
    engine.mark_ready(INFO)
    assert (len(engine.prefixes), engine.rate.tokens_per_second, engine.breaker.failures) == (1, 10, 1)
    engine.mark_ready(EngineInfo(Role.DECODE, "e2", "", 0, 1))
    assert (len(engine.prefixes), engine.rate.tokens_per_second, engine.breaker.failures) == (0, None, 0)
    assert engine.role is Role.DECODE


@pytest.mark.parametrize(
    ("held_at_reading", "held_now", "others", "all_there"),
    [(Held(), Held(), 5, 5), (Held(2, 2), Held(3, 3), 3, 6), (Held(9, 9), Held(1, 1), 0, 1)],
)
def test_requests_of_others_are_told_from_ours(held_at_reading, held_now, others, all_there):
    """What the engine showed, less what we had there then, is others'; what we have now comes on top."""
    engine = Engine("http://e", held=held_now, load=EngineLoad(0, held_at_reading, 4, 1, 0.0, None))
    assert (engine.other_requests, engine.requests) == (others, all_there)


@pytest.mark.parametrize("text", ["a:1", "ftp://a", "http://", "http://a:99999", "http://[::1", ""])
def test_what_is_no_url_is_refused(text):
    """With the text that was given."""
    with pytest.raises(ValueError, match="is no engine URL"):
        engine_url(text)


def test_a_url_with_a_password_is_refused_and_not_repeated():
    """What is in it would never be sent, and would stand in logs."""
    with pytest.raises(ValueError, match="no user and password") as refusal:
        engine_url("http://me:secret@engine:8001")
    assert "secret" not in str(refusal.value)


def test_the_key_of_the_control_channel_is_read():
    """Of a prefill worker; without one it is empty."""
    page = info_line(control_public_key="k" * 40)
    assert parse_engine_info(page, Role.PREFILL).public_key == "k" * 40
    assert parse_engine_info(info_line(), Role.PREFILL).public_key == ""
