"""Timelines: what the time of a request went into, and who is remembered."""

import pytest

from kvberth.router.journal import Journal
from kvberth.router.timeline import Phase, Timeline, What

START = 0.0


def timeline(*events, request_id="r", status=None):
    """Events as (seconds since the arrival, what)."""
    one = Timeline(request_id, "/v1/completions", 1.7e9, START)
    for at, what in events:
        one.note(START + at, what)
    if status is not None:
        one.end(START + events[-1][0] + 1, status)
    return one


PUSH = [
    (0.0, What.ADMITTED),
    (0.1, What.PREFILL_SENT),
    (0.1, What.DECODE_SENT),
    (0.4, What.PREFILL_BEGAN),
    (0.5, What.REGISTERED),
    (1.0, What.PREFILL_DONE),
    (1.1, What.TRANSFERRED),
    (1.2, What.FIRST_TOKEN),
]


def test_a_push_goes_through_all_phases():
    """Queue until the first step, prefill, transfer up to the first token, decode; without gaps."""
    assert timeline(*PUSH, status=200).phases(START + 99) == [
        Phase("queue", 0.0, 0.4),
        Phase("prefill", 0.4, 1.0),
        Phase("transfer", 1.0, 1.2),
        Phase("decode", 1.2, 2.2),
    ]


@pytest.mark.parametrize(
    ("seen", "names"),
    [
        (1, ["queue"]),
        (2, ["queue", "prefill"]),
        (5, ["queue", "prefill"]),
        (6, ["queue", "prefill", "transfer"]),
        (8, ["queue", "prefill", "transfer", "decode"]),
    ],
)
def test_a_request_in_flight_is_in_its_last_phase_until_now(seen, names):
    """What has not happened yet has no phase; until P's first step is heard of, sending the leg counts."""
    phases = timeline(*PUSH[:seen]).phases(START + 50)
    assert [phase.name for phase in phases] == names
    assert phases[-1].end == 50
    assert [phase.begin for phase in phases[1:]] == [phase.end for phase in phases[:-1]]


def test_an_undivided_request_has_no_transfer():
    """Its decode worker does the prefill."""
    events = [(0.0, What.ADMITTED), (0.1, What.DECODE_SENT), (0.6, What.FIRST_TOKEN)]
    assert timeline(*events, status=200).phases(START) == [
        Phase("queue", 0.0, 0.1),
        Phase("prefill", 0.1, 0.6),
        Phase("decode", 0.6, 1.6),
    ]


def test_an_answer_in_one_piece_decodes_from_the_end_of_its_transfer():
    """Nobody sees its first token."""
    phases = timeline(*PUSH[:-1], (3.0, What.LEG_FAILED), status=200).phases(START)
    assert [(phase.name, phase.begin) for phase in phases][-1] == ("decode", 1.1)


def test_a_first_token_that_comes_before_the_prefill_is_done():
    """D held all of the prompt."""
    events = [*PUSH[:4], (0.5, What.FIRST_TOKEN), (0.9, What.PREFILL_DONE)]
    assert [phase.name for phase in timeline(*events, status=200).phases(START)] == ["queue", "prefill", "decode"]


def test_a_continued_stream_is_in_decode_all_the_time():
    """The second prefill holds no first token up."""
    events = [*PUSH, (2.0, What.CONTINUED), (2.1, What.PREFILL_SENT), (2.5, What.PREFILL_DONE), (2.6, What.FIRST_TOKEN)]
    phases = timeline(*events, status=200).phases(START)
    assert phases[-1] == Phase("decode", 1.2, 3.6)
    assert phases[-2] == Phase("transfer", 1.0, 1.2)


def test_a_refused_request_was_in_the_queue_only():
    """Nothing else happened to it."""
    assert timeline((0.0, What.ADMITTED), status=429).phases(START) == [Phase("queue", 0.0, 1.0)]


def test_the_journal_keeps_the_last_ones():
    """In flight by age, ended from the newest on, and no more than so many."""
    journal = Journal(recent=2)
    ended = [timeline((0.0, What.ADMITTED), request_id=str(number)) for number in range(4)]
    for one in ended:
        journal.begin(one)
    assert journal.in_flight == ended
    for one in ended[:3]:
        one.end(START, 200)
        journal.end(one)
    assert journal.in_flight == ended[3:]
    assert journal.recent == [ended[2], ended[1]]
    assert (journal.find("0"), journal.find("1"), journal.find("3")) == (None, ended[1], ended[3])


def test_the_newest_of_two_with_one_id_is_found():
    """Clients choose ids."""
    journal = Journal()
    first, second, third = (timeline((0.0, What.ADMITTED)) for _ in range(3))
    for one in (first, second):
        journal.begin(one)
        one.end(START, 200)
        journal.end(one)
    assert journal.find("r") is second
    journal.begin(third)
    assert journal.find("r") is third


@pytest.mark.anyio
async def test_a_request_is_told_of(site):
    """While it is served and afterwards, with what was chosen and why; unknown ones are a 404, and it is an admin's."""
    client = await site.router([await site.prefill()], [await site.decode()], admin_api_key="admin")
    async with client.post({"prompt": "hi", "max_tokens": 1}, x_request_id="mine/1?") as response:
        assert response.status == 200
    async with client.get("/kvberth/requests/mine%2F1%3F", authorization="Bearer admin") as response:
        told = await response.json()
    assert (told["request_id"], told["path"], told["status"], told["mode"]) == ("mine/1?", "push", 200, "push")
    happened = {event["what"]: event["facts"] for event in told["events"]}
    assert {"admitted", "prefill_sent", "binding_chosen", "decode_sent", "ended"} <= set(happened)
    assert happened["decode_sent"]["reason"]
    assert happened["prefill_sent"]["transfer_id"]
    async with client.get("/kvberth/requests", authorization="Bearer admin") as response:
        listed = await response.json()
    assert [each["request_id"] for each in listed["recent"]] == ["mine/1?"]
    assert listed["in_flight"] == []
    for path, key, status in (("/kvberth/requests/other", "admin", 404), ("/kvberth/requests", "x", 401)):
        async with client.get(path, authorization=f"Bearer {key}") as response:
            assert response.status == status
