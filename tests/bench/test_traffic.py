"""The plan: what the settings and the seed say, and nothing else."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvberth.bench import Arrivals, RandomTraffic
from kvberth.bench.arrivals import arrival_seconds


def prompts(traffic):
    return [tuple(each.prompt_token_ids.tolist()) for each in traffic.plan().requests]


def arrivals_of(traffic):
    return [each.arrival_seconds for each in traffic.plan().requests]


small = st.builds(
    RandomTraffic,
    requests=st.integers(1, 12),
    rate=st.floats(0.01, 1000),
    arrivals=st.sampled_from([Arrivals.POISSON, Arrivals.UNIFORM]),
    prompt_tokens=st.integers(4, 40),
    output_tokens=st.integers(1, 9),
    token_range=st.tuples(st.integers(0, 5), st.integers(10, 500)),
    prefix_share=st.floats(0, 0.3),
    prefixes=st.integers(1, 4),
    cancel_share=st.floats(0, 1),
    cancel_seconds=st.none() | st.floats(0.01, 10),
    warmup=st.integers(0, 4),
    seed=st.integers(0, 2**64),
)


@settings(max_examples=50)
@given(small)
def test_a_plan_is_what_was_asked_for(traffic):
    """Counts, lengths, the range of ids, and the order of arrivals."""
    plan = traffic.plan()
    assert [each.index for each in plan.requests] == list(range(traffic.requests))
    assert len(plan.warmup) == traffic.warmup
    low, high = traffic.token_range
    for each in plan.requests + plan.warmup:
        assert each.prompt_token_ids.shape == (traffic.prompt_tokens,)
        assert low <= each.prompt_token_ids.min() <= each.prompt_token_ids.max() < high
        assert each.output_tokens == traffic.output_tokens
    arrivals = [each.arrival_seconds for each in plan.requests]
    assert arrivals[0] == 0
    assert arrivals == sorted(arrivals)


@settings(max_examples=50)
@given(small)
def test_no_two_prompts_are_alike(traffic):
    """Those of the warm-up included: nothing is in a prefix cache as a whole."""
    plan = traffic.plan()
    assert len({each.prompt_token_ids.tobytes() for each in plan.requests + plan.warmup}) == (
        traffic.requests + traffic.warmup
    )


@settings(max_examples=50)
@given(small, st.integers(1, 20))
def test_a_request_depends_on_seed_and_place_only(traffic, more):
    """A longer run begins with the shorter one."""
    longer = dataclasses.replace(traffic, requests=traffic.requests + more)
    assert prompts(longer)[: traffic.requests] == prompts(traffic)
    assert arrivals_of(longer)[: traffic.requests] == arrivals_of(traffic)


@settings(max_examples=50)
@given(small)
def test_drawn_twice_is_the_same(traffic):
    """To the last token, and whatever the time is; the digest says so."""
    assert traffic.plan().sha256() == traffic.plan().sha256()
    assert dataclasses.replace(traffic, seed=traffic.seed + 1).plan().sha256() != traffic.plan().sha256()


@settings(max_examples=100)
@given(st.sampled_from([Arrivals.POISSON, Arrivals.UNIFORM]), st.floats(1e-3, 1e4), st.integers(1, 200), st.integers(0))
def test_arrivals_are_in_order_and_scale_with_the_rate(arrivals, rate, count, seed):
    """From 0 on, as many as asked for; a shorter list is the beginning of a longer one."""
    draw = np.random.SeedSequence(seed)
    times = arrival_seconds(arrivals, rate, count, draw)
    assert len(times) == count
    assert times[0] == 0
    assert times == sorted(times)
    assert math.isfinite(times[-1])
    assert np.allclose(np.array(times) * rate, arrival_seconds(arrivals, 1.0, count, draw))
    assert arrival_seconds(arrivals, rate, count + 7, draw)[:count] == times


def test_shared_prefixes():
    """The given share of each prompt is one of so many beginnings, and each of these is used; the rest is its own."""
    traffic = RandomTraffic(requests=40, prompt_tokens=100, prefix_share=0.7, prefixes=3)
    beginnings = {prompt[:70] for prompt in prompts(traffic)}
    assert len(beginnings) == 3
    assert len({prompt[70:] for prompt in prompts(traffic)}) == 40
    warm = {tuple(each.prompt_token_ids[:70].tolist()) for each in traffic.plan().warmup}
    assert not warm & beginnings


def test_one_token_of_a_prompt_is_always_its_own():
    """However large the share is."""
    traffic = RandomTraffic(requests=5, prompt_tokens=4, prefix_share=0.99)
    assert len(set(prompts(traffic))) == 5


def test_conversations():
    """Each turn follows the one before it, adds its own tokens only, and conversations come at the rate of requests."""
    traffic = RandomTraffic(requests=8, turns=3, rate=6, arrivals=Arrivals.UNIFORM, prompt_tokens=10, prefix_share=0.5)
    plan = traffic.plan()
    assert [each.follows for each in plan.requests] == [None, 0, 1, None, 3, 4, None, 6]
    conversations = list(plan.conversations())
    assert [len(turns) for turns in conversations] == [3, 3, 2]
    assert [turns[0].arrival_seconds for turns in conversations] == [0.0, 0.5, 1.0]
    first = plan.requests[0].prompt_token_ids[:5].tolist()
    begins_so = [each.prompt_token_ids[:5].tolist() == first for each in plan.requests]
    assert begins_so == [each.follows is None for each in plan.requests]


def test_the_share_of_cancelled_requests():
    """Each after some of its tokens, never after none or all of them."""
    plan = RandomTraffic(requests=2000, prompt_tokens=4, output_tokens=5, cancel_share=0.25).plan()
    cancelled = [each.cancellation for each in plan.requests if each.cancellation]
    assert len(cancelled) == pytest.approx(500, rel=0.15)
    assert {each.tokens for each in cancelled} == {1, 2, 3, 4}
    assert not any(each.cancellation for each in plan.warmup)


def test_cancelled_in_time():
    """Evenly within the seconds that are given."""
    plan = RandomTraffic(requests=2000, prompt_tokens=4, cancel_share=1, cancel_seconds=3.0).plan()
    seconds = [each.cancellation.seconds for each in plan.requests]
    assert 0 <= min(seconds) < max(seconds) <= 3
    assert np.mean(seconds) == pytest.approx(1.5, rel=0.1)


def test_an_answer_of_one_token_has_no_middle():
    """It can be cancelled by time only."""
    settings = {"requests": 20, "prompt_tokens": 4, "output_tokens": 1, "cancel_share": 1.0}
    assert not any(each.cancellation for each in RandomTraffic(**settings).plan().requests)
    assert all(each.cancellation for each in RandomTraffic(**settings, cancel_seconds=1).plan().requests)


def test_all_of_a_small_range_can_be_used():
    """Eight prompts of three bits each are all there are, and all are drawn."""
    traffic = RandomTraffic(requests=6, warmup=2, prompt_tokens=3, token_range=(0, 2))
    assert len(set(prompts(traffic))) == 6


def test_another_seed_is_other_traffic():
    """Prompts and arrivals both."""
    one, other = RandomTraffic(requests=5, seed=1), RandomTraffic(requests=5, seed=2)
    assert not set(prompts(one)) & set(prompts(other))
    assert arrivals_of(one)[1:] != arrivals_of(other)[1:]


def test_the_rate_scales_the_same_traffic():
    """Runs at two rates differ in the rate only."""
    slow, quick = RandomTraffic(requests=50, rate=1), RandomTraffic(requests=50, rate=8)
    assert prompts(slow) == prompts(quick)
    assert np.allclose(np.array(arrivals_of(slow)) / 8, arrivals_of(quick))


def test_poisson_gaps_are_exponential():
    """Mean and standard deviation both are 1/rate."""
    traffic = RandomTraffic(requests=20_000, rate=5, prompt_tokens=4)
    gaps = np.diff(arrivals_of(traffic))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() == pytest.approx(0.2, rel=0.05)


def test_uniform_is_a_fixed_rate():
    """Every gap is 1/rate."""
    traffic = RandomTraffic(requests=4, rate=4, arrivals=Arrivals.UNIFORM)
    assert arrivals_of(traffic) == [0, 0.25, 0.5, 0.75]


def test_prompts_cannot_be_changed():
    """A plan may be sent more than once."""
    prompt = RandomTraffic(requests=1).plan().requests[0].prompt_token_ids
    with pytest.raises(ValueError, match="read-only"):
        prompt[0] = 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"requests": 0}, "requests: must be 1 or more, not 0"),
        ({"prompt_tokens": 0}, "prompt_tokens: must be 1 or more, not 0"),
        ({"output_tokens": 0}, "output_tokens: must be 1 or more, not 0"),
        ({"warmup": -1}, "warmup: must be 0 or more, not -1"),
        ({"seed": -1}, "seed: must be 0 or more, not -1"),
        ({"rate": 0.0}, "rate: must be above 0 requests per second, not 0.0"),
        ({"rate": math.nan}, "rate: must be above 0 requests per second, not nan"),
        ({"rate": math.inf}, "rate: must be above 0 requests per second, not inf"),
        ({"prefix_share": 1.0}, "prefix_share: must be 0 or more and below 1, not 1.0"),
        ({"prefix_share": math.nan}, "prefix_share: must be 0 or more and below 1, not nan"),
        ({"prefixes": 0}, "prefixes: must be 1 or more, not 0"),
        ({"turns": 0}, "turns: must be 1 or more, not 0"),
        ({"cancel_share": 1.5}, "cancel_share: must be from 0 to 1, not 1.5"),
        ({"cancel_seconds": 0.0}, "cancel_seconds: must be above 0 and finite, not 0.0"),
        ({"arrivals": Arrivals.TRACE}, "arrivals: must be poisson or uniform, not trace"),
        ({"arrivals": "never"}, "arrivals: must be poisson or uniform, not never"),
        ({"token_range": (5, 5)}, "token_range: must be LOW:HIGH with 0 <= LOW < HIGH, not 5:5"),
        ({"token_range": (-1, 5)}, "token_range: must be LOW:HIGH with 0 <= LOW < HIGH, not -1:5"),
        (
            {"token_range": (0, 2), "prompt_tokens": 3, "requests": 7},
            "token_range: 2 token ids make fewer than 9 different prompts of 3 tokens; give more ids or longer prompts",
        ),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    """The text names the setting and what would be right."""
    with pytest.raises(ValueError, match=r".") as caught:
        RandomTraffic(**wrong)
    assert str(caught.value) == message
