"""Each way in which a request can end is called what it is."""

import json

import pytest

from kvberth.drills.client import Reply
from kvberth.drills.judge import Outcome, Verdict, Window, judge, objections
from kvberth.drills.traffic import DrillRequest


def request(*, is_streamed: bool, leaves_after_seconds: float | None = None) -> DrillRequest:
    return DrillRequest(
        index=0,
        arrival_seconds=0.0,
        prompt=(1, 2, 3),
        output_tokens=2,
        is_streamed=is_streamed,
        mode="push",
        binding="early",
        leaves_after_seconds=leaves_after_seconds,
        deadline_seconds=10.0,
        answer=" one two",
    )


def event(**what: object) -> bytes:
    return b"data: " + json.dumps(what).encode() + b"\n\n"


def chunk(text: str) -> bytes:
    return event(choices=[{"text": text}])


DONE = b"data: [DONE]\n\n"
WHOLE = json.dumps({"choices": [{"text": " one two"}]}).encode()
ERROR = json.dumps({"error": {"message": "The decode leg's engine failed.", "code": "decode_failed"}}).encode()


def reply(body: bytes = b"", status: int | None = 200, *, is_streamed: bool = False, **more: object) -> Reply:
    asked = request(is_streamed=is_streamed)
    return Reply(asked, 1.0, 2.0, status, body, **more)  # type: ignore[arg-type]


CASES = {
    "whole": (reply(WHOLE), Outcome.RIGHT),
    "stream": (reply(chunk(" one") + chunk(" two") + DONE, is_streamed=True), Outcome.RIGHT),
    "other text": (reply(json.dumps({"choices": [{"text": " one three"}]}).encode()), Outcome.WRONG),
    "half of the text": (reply(json.dumps({"choices": [{"text": " one"}]}).encode()), Outcome.WRONG),
    "no choices": (reply(b'{"choices": []}'), Outcome.WRONG),
    "empty 200": (reply(b""), Outcome.WRONG),
    "empty stream": (reply(b"", is_streamed=True), Outcome.BROKEN),
    "other stream": (reply(chunk(" one") + chunk(" three") + DONE, is_streamed=True), Outcome.WRONG),
    "short stream": (reply(chunk(" one") + DONE, is_streamed=True), Outcome.WRONG),
    "token twice": (reply(chunk(" one") + chunk(" one") + chunk(" two") + DONE, is_streamed=True), Outcome.WRONG),
    "cut stream": (reply(chunk(" one"), is_streamed=True), Outcome.BROKEN),
    "stream with error": (reply(chunk(" one") + event(error={"message": "lost"}), is_streamed=True), Outcome.REFUSED),
    "wrong, then an error": (reply(chunk(" x") + event(error={"message": "lost"}), is_streamed=True), Outcome.WRONG),
    "error": (reply(ERROR, 502), Outcome.REFUSED),
    "error of a stream": (reply(ERROR, 503, is_streamed=True), Outcome.REFUSED),
    "error without words": (reply(b"", 502), Outcome.WRONG),
    "error that is no JSON": (reply(b"<html>Bad gateway</html>", 502), Outcome.WRONG),
    "cut answer": (reply(WHOLE[:9], broken="ClientPayloadError: not complete"), Outcome.BROKEN),
    "no connection": (reply(b"", None, broken="ClientConnectorError: refused"), Outcome.BROKEN),
    "left": (reply(b"", None, has_left=True), Outcome.LEFT),
    "left a stream": (reply(chunk(" one"), is_streamed=True, has_left=True), Outcome.LEFT),
    "left a wrong stream": (reply(chunk(" x"), is_streamed=True, has_left=True), Outcome.WRONG),
    "hung": (reply(b"", None, is_hung=True), Outcome.HUNG),
    "hung in mid-stream": (reply(chunk(" one"), is_streamed=True, is_hung=True), Outcome.HUNG),
}


@pytest.mark.parametrize("name", CASES)
def test_outcome(name):
    """A right prefix is not a right answer, and a polite error is no excuse for a wrong word before it."""
    answered, outcome = CASES[name]
    assert judge(answered).outcome is outcome


def test_wrong_answer_says_where_it_begins_to_differ():
    """With both texts."""
    verdict = judge(reply(json.dumps({"choices": [{"text": " one three"}]}).encode()))
    assert verdict.why == "differs from character 6 on: 'hree' for 'wo'"


REFUSED = Verdict(Outcome.REFUSED, "502: no")


@pytest.mark.parametrize(
    ("window", "excused", "count"),
    [
        (None, frozenset(), 1),
        (Window(1.5, 3.0), frozenset({Outcome.REFUSED}), 0),
        (Window(0.0, 1.0), frozenset({Outcome.REFUSED}), 0),
        (Window(2.5, 3.0), frozenset({Outcome.REFUSED}), 1),
        (Window(0.0, 0.5), frozenset({Outcome.REFUSED}), 1),
        (Window(0.0, 9.0), frozenset({Outcome.BROKEN}), 1),
    ],
)
def test_refusals_are_excused_while_the_fault_can_be_felt(window, excused, count):
    """The request was under way from 1 to 2 s."""
    assert len(objections([reply(ERROR, 502)], [REFUSED], window, excused)) == count


@pytest.mark.parametrize("outcome", [Outcome.WRONG, Outcome.HUNG])
def test_nothing_excuses_wrong_answers_and_hanging_requests(outcome):
    """No drill may name them."""
    from kvberth.drills.catalogue import DRILLS

    assert not any(outcome in drill.excused for drill in DRILLS)
    found = objections([reply()], [Verdict(outcome, "why")], Window(0.0, 9.0), frozenset({Outcome.REFUSED}))
    assert found == [f"request 0 (push, unstreamed, 1.00 to 2.00 s) {outcome}: why"]
