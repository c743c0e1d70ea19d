"""A measurement from plan to figures."""

import pytest

from kvberth.bench import RandomTraffic, Target, TargetError, run

from .fakes import answers, generates, in_turn, listening

pytestmark = pytest.mark.anyio


def traffic(**settings):
    return RandomTraffic(**{"requests": 6, "rate": 100, "prompt_tokens": 8, "output_tokens": 3, "warmup": 2} | settings)


async def test_records_and_figures():
    """One record per planned request, in the plan's order, and the summary of them."""
    plan = traffic().plan()
    async with listening(generates()) as server:
        result = await run(plan, Target(url=server.url))
    assert result.model == "fake-model"
    assert [record.index for record in result.records] == list(range(6))
    assert (result.summary.succeeded, result.summary.output_tokens, result.summary.prompt_tokens) == (6, 18, 48)
    assert all(record.headers == {"x-kvberth-path": "push"} for record in result.records)
    assert len({record.request_id for record in result.records}) == 6


async def test_the_warm_up_comes_first_and_is_not_measured():
    """One after another, before the first planned request."""
    plan = traffic().plan()
    async with listening(generates()) as server:
        result = await run(plan, Target(url=server.url, model="m"))
    sent = [body["prompt"] for body in server.bodies]
    assert sent[:2] == [each.prompt_token_ids.tolist() for each in plan.warmup]
    assert sorted(sent[2:]) == sorted(each.prompt_token_ids.tolist() for each in plan.requests)
    assert len(result.records) == 6


async def test_a_failed_warm_up_ends_it():
    """A server that cannot answer one request is not worth a hundred."""
    async with listening(in_turn(generates(), answers(500, {"error": "no room"}))) as server:
        with pytest.raises(TargetError, match="warm-up request 2 of 2 failed: HTTP 500: no room"):
            await run(traffic().plan(), Target(url=server.url))
    assert len(server.bodies) == 2


async def test_failed_requests_are_counted():
    """They end nothing."""
    async with listening(in_turn(answers(500, {"error": "no room"}), generates())) as server:
        result = await run(traffic(warmup=0).plan(), Target(url=server.url))
    assert (result.summary.succeeded, result.summary.failures) == (5, {"HTTP 500": 1})


async def test_progress_and_records_are_told_meanwhile():
    """From nothing sent to all done; each record once, when its request has ended."""
    seen, records = [], []
    async with listening(generates()) as server:
        result = await run(
            traffic().plan(),
            Target(url=server.url),
            on_progress=lambda progress: seen.append((progress.total, progress.sent, progress.done, progress.failed)),
            on_record=records.append,
        )
    assert (seen[0], seen[-1]) == ((6, 0, 0, 0), (6, 6, 6, 0))
    assert sorted(records, key=lambda record: record.index) == list(result.records)


async def test_the_same_prompt_has_the_same_answer():
    """So that answers of two runs can be compared by their hashes."""
    async with listening(generates()) as server:
        one = await run(traffic().plan(), Target(url=server.url))
        other = await run(traffic().plan(), Target(url=server.url))
    assert [record.text_sha256 for record in one.records] == [record.text_sha256 for record in other.records]
    assert len({record.text_sha256 for record in one.records}) == 6
