"""The plan: what the settings and the seed say, and nothing else."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvberth.bench import Arrivals, RandomTraffic


def prompts(traffic):
    return [tuple(each.prompt_token_ids.tolist()) for each in traffic.plan().requests]


def arrival_seconds(traffic):
    return [each.arrival_seconds for each in traffic.plan().requests]


small = st.builds(
    RandomTraffic,
    requests=st.integers(1, 12),
    rate=st.floats(0.01, 1000),
    arrivals=st.sampled_from([Arrivals.POISSON, Arrivals.UNIFORM]),
    prompt_tokens=st.integers(3, 40),
    output_tokens=st.integers(1, 9),
    token_range=st.tuples(st.integers(0, 5), st.integers(10, 500)),
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
    assert arrival_seconds(longer)[: traffic.requests] == arrival_seconds(traffic)


def test_all_of_a_small_range_can_be_used():
    """Eight prompts of three bits each are all there are, and all are drawn."""
    traffic = RandomTraffic(requests=6, warmup=2, prompt_tokens=3, token_range=(0, 2))
    assert len(set(prompts(traffic))) == 6


def test_another_seed_is_other_traffic():
    """Prompts and arrivals both."""
    one, other = RandomTraffic(requests=5, seed=1), RandomTraffic(requests=5, seed=2)
    assert not set(prompts(one)) & set(prompts(other))
    assert arrival_seconds(one)[1:] != arrival_seconds(other)[1:]


def test_the_rate_scales_the_same_traffic():
    """Runs at two rates differ in the rate only."""
    slow, quick = RandomTraffic(requests=50, rate=1), RandomTraffic(requests=50, rate=8)
    assert prompts(slow) == prompts(quick)
    assert np.allclose(np.array(arrival_seconds(slow)) / 8, arrival_seconds(quick))


def test_poisson_gaps_are_exponential():
    """Mean and standard deviation both are 1/rate."""
    traffic = RandomTraffic(requests=20_000, rate=5, prompt_tokens=4)
    gaps = np.diff(arrival_seconds(traffic))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() == pytest.approx(0.2, rel=0.05)


def test_uniform_is_a_fixed_rate():
    """Every gap is 1/rate."""
    traffic = RandomTraffic(requests=4, rate=4, arrivals=Arrivals.UNIFORM)
    assert arrival_seconds(traffic) == [0, 0.25, 0.5, 0.75]


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
