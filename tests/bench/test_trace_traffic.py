"""A trace's plan: its times and lengths, and tokens where it has none."""

import dataclasses
import math
from pathlib import Path

import pytest

from kvberth.bench import Arrivals, Message, Trace, TraceTraffic, read_trace
from kvberth.bench.traces import BadRow, GivenTokens, HashedBlocks, RandomTokens, TraceRow, Turn

SAMPLES = Path(__file__).parent / "traces"


def sample(name, **settings):
    return read_trace(SAMPLES / name, requests=100, turns=9, skip_bad_rows=True, **settings)


def trace(*prompts, seconds=None, output_tokens=2, unit="seconds"):
    """A trace with a row per prompt."""
    times = seconds or [float(number) for number in range(len(prompts))]
    rows = [
        TraceRow(number, time, (Turn(prompt, output_tokens),))
        for number, (prompt, time) in enumerate(zip(prompts, times, strict=True), start=1)
    ]
    return Trace(Path("/t/trace"), "custom", tuple(rows), time_unit=unit)


def prompts(traffic):
    return [each.prompt_token_ids.tolist() for each in traffic.plan().requests]


def arrivals(traffic):
    return [each.arrival_seconds for each in traffic.plan().requests]


def test_times_and_lengths_are_the_trace_s():
    """From its first row on."""
    requests = TraceTraffic(trace=sample("burstgpt.csv")).plan().requests
    assert [(each.arrival_seconds, len(each.prompt_token_ids), each.output_tokens) for each in requests] == [
        (0.0, 300, 20),
        (12.0, 95, 410),
        (13.5, 1200, 64),
    ]


def test_speed_divides_the_times():
    """Nothing else."""
    plain, quick = (TraceTraffic(trace=sample("burstgpt.csv"), speed=speed) for speed in (1.0, 4.0))
    assert arrivals(quick) == [0.0, 3.0, 3.375]
    assert prompts(quick) == prompts(plain)


def test_other_arrivals_at_a_rate():
    """The lengths are the trace's, the times are not."""
    traffic = TraceTraffic(trace=sample("sharegpt.json"), arrivals=Arrivals.UNIFORM, rate=3)
    assert arrivals(traffic) == [0.0, 0.0, 0.5]  # two conversations of three requests
    assert [each.follows for each in traffic.plan().requests] == [None, 0, None]


def test_rows_out_of_order_are_sent_in_the_order_of_their_times():
    """As logs that several servers wrote have them; equal times keep the file's order."""
    traffic = TraceTraffic(trace=trace(*map(RandomTokens, (1, 2, 3, 4)), seconds=[5.0, 4.0, 5.0, 7.0]))
    assert arrivals(traffic) == [0.0, 1.0, 1.0, 3.0]
    assert [len(prompt) for prompt in prompts(traffic)] == [2, 1, 3, 4]


def test_equal_hash_ids_are_equal_blocks():
    """Of 512 tokens; a last one that is cut off is the beginning of the whole one. Others differ."""
    one, other, third, _, last = prompts(TraceTraffic(trace=sample("mooncake.jsonl")))
    assert (len(one), len(other), len(third), len(last)) == (1300, 700, 1536, 1310)
    assert one[:512] == other[:512] == third[:512]
    assert one[512:1024] == third[512:1024]
    assert one[1024:] == last[1024:1300]
    assert one[1024:] != third[1024:1300]
    assert len({tuple(each) for each in (one[:512], one[512:1024], third[1024:], other[512:])}) == 4


def test_a_block_is_the_same_in_every_trace():
    """It depends on the seed and its id only."""
    one = TraceTraffic(trace=trace(RandomTokens(9), HashedBlocks(600, (7, 8))))
    other = TraceTraffic(trace=trace(HashedBlocks(1024, (9, 8))))
    assert prompts(one)[1][512:] == prompts(other)[0][512:600]
    assert prompts(dataclasses.replace(one, seed=1))[1] != prompts(one)[1]


def test_what_is_given_is_sent():
    """Token ids as they are, texts as a chat."""
    text = (Message(role="user", content="a"),)
    plan = TraceTraffic(trace=trace(GivenTokens((5, 6)), text)).plan()
    assert plan.requests[0].prompt_token_ids.tolist() == [5, 6]
    assert plan.requests[1].messages == text
    assert not plan.requests[1].prompt_token_ids.size


def test_random_prompts_differ():
    """Rows of one length are no repetition of each other."""
    first, second = prompts(TraceTraffic(trace=trace(RandomTokens(30), RandomTokens(30))))
    assert first != second


@pytest.mark.parametrize("name", ["mooncake.jsonl", "azure-2023.csv", "burstgpt.csv", "custom.jsonl", "sharegpt.json"])
def test_one_seed_is_one_plan(name):
    """For every format; another seed draws other tokens, arrivals or cancellations."""
    recorded = sample(name)
    settings = {"trace": recorded, "cancel_share": 0.5}
    if recorded.time_unit is None:
        settings["arrivals"] = Arrivals.POISSON
    one, again, other = (TraceTraffic(**settings, seed=seed).plan().sha256() for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_the_first_requests_only():
    """Whatever was read."""
    assert len(TraceTraffic(trace=sample("mooncake.jsonl"), requests=2).plan().requests) == 2
    conversations = TraceTraffic(trace=sample("sharegpt.json"), arrivals=Arrivals.POISSON, requests=1).plan()
    assert [len(turns) for turns in conversations.conversations()] == [1]


def test_output_tokens_can_be_set_for_all():
    """In place of those of the trace."""
    plan = TraceTraffic(trace=sample("burstgpt.csv"), output_tokens=7).plan()
    assert {each.output_tokens for each in plan.requests} == {7}


def test_the_warm_up_knows_nothing_of_the_trace():
    """It has the lengths of its first requests, and none of their tokens."""
    plan = TraceTraffic(trace=sample("mooncake.jsonl"), warmup=6).plan()
    assert [len(each.prompt_token_ids) for each in plan.warmup] == [1300, 700, 1536, 28, 1310, 1300]
    assert plan.warmup[0].prompt_token_ids[:16].tolist() != plan.requests[0].prompt_token_ids[:16].tolist()
    chats = TraceTraffic(trace=sample("sharegpt.json"), arrivals=Arrivals.POISSON, warmup=3).plan()
    assert len({each.messages for each in chats.warmup}) == 3
    assert not {each.messages for each in chats.warmup} & {each.messages for each in chats.requests}


def test_settings_say_where_it_came_from():
    """The file's name, its format, which lines, and what was left out; no prompts."""
    recorded = dataclasses.replace(sample("burstgpt.csv"), skipped=(BadRow(9, "bad"),))
    settings = TraceTraffic(trace=recorded, speed=2.0, seed=3).settings()
    assert (settings["speed"], settings["seed"]) == (2.0, 3)
    assert settings["trace"] == {
        "file": "burstgpt.csv",
        "format": "burstgpt",
        "lines": [2, 4],
        "skipped": [{"line": 9, "reason": "bad"}],
    }


TEN = tuple(map(RandomTokens, range(1, 11)))
DENSE = trace(*TEN, seconds=[number / 2000 for number in range(10)], unit="milliseconds")
SPARSE = trace(*TEN, seconds=[1000.0 * number for number in range(10)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"trace": DENSE},
            "trace: /t/trace has 2,000 requests per second; its times must be milliseconds; if they are, set speed",
        ),
        (
            {"trace": SPARSE},
            "trace: /t/trace has a request every 1,000 s; its times must be seconds; if they are, set speed",
        ),
        (
            {"trace": trace(RandomTokens(1), output_tokens=None)},
            "output_tokens: must be given, since /t/trace:1 does not say",
        ),
        (
            {"trace": trace(RandomTokens(1), seconds=[None], unit=None)},
            "arrivals: /t/trace has no times; take poisson or uniform",
        ),
        (
            {"trace": DENSE, "arrivals": Arrivals.POISSON, "speed": 2.0},
            "speed: is for arrivals trace; for poisson set rate",
        ),
        ({"trace": DENSE, "speed": 0.0}, "speed: must be above 0 and finite, not 0.0"),
        ({"trace": DENSE, "speed": math.inf}, "speed: must be above 0 and finite, not inf"),
        ({"trace": DENSE, "arrivals": "never"}, "arrivals: must be poisson or uniform or trace, not never"),
        ({"trace": DENSE, "output_tokens": 0}, "output_tokens: must be 1 or more, not 0"),
        ({"trace": DENSE, "requests": 0}, "requests: must be 1 or more, not 0"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    """The text names the setting and what would be right; times in another unit are found by what they would mean."""
    with pytest.raises(ValueError, match=r".") as caught:
        TraceTraffic(**settings)
    assert str(caught.value) == message


def test_times_that_only_look_wrong_can_be_used():
    """With a speed that makes them plausible, with other arrivals, or if there are too few to tell."""
    TraceTraffic(trace=DENSE, speed=0.001)
    TraceTraffic(trace=SPARSE, speed=1000.0)
    TraceTraffic(trace=DENSE, arrivals=Arrivals.POISSON)
    TraceTraffic(trace=DENSE, requests=9)
    TraceTraffic(trace=trace(*TEN, seconds=[3.0] * 10))
