"""Conversations, chats and clients that go away."""

import asyncio
import dataclasses

import numpy as np
import pytest

from kvberth.bench import Arrivals, Cancellation, Message, Plan, PlannedRequest, RandomTraffic, Target, run
from kvberth.bench.sending import next_turn
from kvberth.bench.stream import Answer

from .fakes import DONE, answers, begin, event, generates, in_turn, listening, streams, token, usage

pytestmark = pytest.mark.anyio


def with_ids(*ids):
    """A completion's answer, a token per chunk, with the ids that it was asked for."""
    chunks = [event({"choices": [{"text": f" {each}", "token_ids": [each]}]}) for each in ids]
    return streams(*chunks, usage(9, len(ids)), DONE)


def said(text, **delta):
    return event({"choices": [{"index": 0, "delta": {"content": text, **delta}}]})


def chat(*texts):
    return streams(said("", role="assistant"), *map(said, texts), usage(9, len(texts)), DONE)


def two_turns(**settings):
    return RandomTraffic(
        **{"requests": 2, "turns": 2, "prompt_tokens": 3, "output_tokens": 2, "warmup": 0} | settings
    ).plan()


def question(index, text, **settings):
    nothing = np.array([], dtype=np.int32)
    messages = (Message(role="user", content=text),)
    return PlannedRequest(index, 0.0, nothing, 2, messages=messages, **settings)


async def result_of(plan, behave):
    async with listening(behave) as server:
        return await run(plan, Target(url=server.url, model="m")), server


async def test_a_later_turn_has_the_answer_in_its_prompt():
    """Token by token; ids are asked for only where there is a next turn."""
    plan = two_turns()
    result, server = await result_of(plan, in_turn(with_ids(7, 8), with_ids(9, 10)))
    first, second = (each.prompt_token_ids.tolist() for each in plan.requests)
    assert [body["prompt"] for body in server.bodies] == [first, [*first, 7, 8, *second]]
    assert [body.get("return_token_ids") for body in server.bodies] == [True, None]
    assert [record.follows for record in result.records] == [None, 0]
    assert result.summary.succeeded == 2
    assert result.records[0].chunk_tokens == [1, 1]


async def test_a_later_turn_goes_out_after_the_answer():
    """It is due at that moment, and late by what the generator takes."""
    result, server = await result_of(two_turns(), with_ids(7, 8))
    first, second = result.records
    assert second.planned_s >= first.sent_s + first.e2e_ms / 1000
    assert second.sent_s == pytest.approx(second.planned_s + second.late_ms / 1000, abs=1e-5)
    assert 0 <= second.late_ms < 100
    assert len(server.bodies) == 2


async def test_other_conversations_do_not_wait():
    """Open loop: a conversation comes when it is due, however slow another is."""
    plan = two_turns(requests=4, rate=100, arrivals=Arrivals.UNIFORM)
    slow = in_turn(generates(seconds_before=0.3), with_ids(7, 8))
    result, _ = await result_of(plan, slow)
    assert result.records[2].sent_s < 0.2
    assert result.records[3].sent_s < 0.3


async def test_a_failed_turn_ends_its_conversation():
    """What cannot be sent is a failure with its reason, and a record."""
    plan = two_turns(requests=3, turns=3)
    result, server = await result_of(plan, in_turn(with_ids(7, 8), answers(500, {"error": "no room"})))
    assert [record.error for record in result.records] == [
        None,
        "HTTP 500: no room",
        "not sent: the turn before it failed",
    ]
    assert not result.records[2].was_sent
    assert len(server.bodies) == 2


async def test_a_server_without_token_ids():
    """Is told apart from one that fails."""
    result, _ = await result_of(two_turns(), generates())
    reason = "not sent: the answer before it came without token ids: the server does not know return_token_ids"
    assert [record.error for record in result.records] == [None, reason]


async def test_a_chat():
    """Its own path and messages; the answer is a message of the next turn."""
    plan = Plan((question(0, "a"), question(1, "b", follows=0)))
    result, server = await result_of(plan, chat("x", "y"))
    assert server.paths == ["/v1/chat/completions"] * 2
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "a"}]
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "xy"},
        {"role": "user", "content": "b"},
    ]
    assert "prompt" not in server.bodies[0]
    assert [(record.error, record.output_tokens, len(record.itl_ms)) for record in result.records] == [(None, 2, 1)] * 2


def endless(was_cut, make=lambda number: token(f" {number}")):
    """A token every 10 ms until the client goes."""

    async def behave(_server, request, _body):
        response = await begin(request)
        try:
            for number in range(1000):
                await response.write(make(number))
                await asyncio.sleep(0.01)
        except ConnectionError:
            was_cut.set()
        return response

    return behave


@pytest.mark.parametrize("cancellation", [Cancellation(tokens=3), Cancellation(seconds=0.1)])
async def test_a_client_goes_away(cancellation):
    """The server sees it, and the record has what had come: neither a success nor a failure."""
    was_cut = asyncio.Event()
    (planned,) = RandomTraffic(requests=1, prompt_tokens=3, output_tokens=500).plan().requests
    plan = Plan((dataclasses.replace(planned, cancellation=cancellation),))
    async with listening(endless(was_cut)) as server:
        result = await run(plan, Target(url=server.url, model="m"))
        await asyncio.wait_for(was_cut.wait(), 5)
    (record,) = result.records
    assert (record.cancelled, record.error, record.e2e_ms, record.tpot_ms) == (True, None, None, None)
    assert record.text_sha256 is None
    assert record.ttft_ms > 0
    assert 1 <= record.output_tokens < 500
    if cancellation.tokens:
        assert record.output_tokens == 3
    assert (result.summary.cancelled, result.summary.failed, result.summary.succeeded) == (1, 0, 0)


async def test_an_answer_that_is_quicker_is_a_success():
    """Nobody goes away from an answer that is there."""
    (planned,) = RandomTraffic(requests=1, prompt_tokens=3, output_tokens=2).plan().requests
    plan = Plan((dataclasses.replace(planned, cancellation=Cancellation(seconds=5.0)),))
    result, _ = await result_of(plan, generates())
    assert (result.summary.succeeded, result.summary.cancelled) == (1, 0)


async def test_a_failure_before_the_client_goes_is_a_failure():
    """It was not the client who ended it."""
    (planned,) = RandomTraffic(requests=1, prompt_tokens=3, output_tokens=9).plan().requests
    plan = Plan((dataclasses.replace(planned, cancellation=Cancellation(tokens=5)),))
    result, _ = await result_of(plan, streams(token("a"), event({"error": {"message": "lost"}}), DONE))
    assert result.summary.failures == {"error in the stream": 1}


async def test_who_went_away_goes_on_with_what_there_was():
    """As people do who stop an answer and ask again."""
    was_cut = asyncio.Event()
    cut = endless(was_cut, lambda number: event({"choices": [{"text": "x", "token_ids": [number]}]}))
    first, second = two_turns().requests
    plan = Plan((dataclasses.replace(first, output_tokens=500, cancellation=Cancellation(tokens=2)), second))
    result, server = await result_of(plan, in_turn(cut, with_ids(7, 8)))
    begins = first.prompt_token_ids.tolist()
    assert server.bodies[1]["prompt"] == [*begins, 0, 1, *second.prompt_token_ids.tolist()]
    assert [record.cancelled for record in result.records] == [True, False]


def test_nothing_of_an_answer_is_a_turn_too():
    """A client that went before the first token asks again with what it had."""
    first, second = two_turns().requests
    planned = next_turn(first, Answer(), second, 1.5)
    assert planned.prompt_token_ids.tolist() == [*first.prompt_token_ids.tolist(), *second.prompt_token_ids.tolist()]
    assert planned.arrival_seconds == 1.5
