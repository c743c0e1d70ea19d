"""The time of a step: by hand, by what must not matter, and by what the profiles are to give."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvberth.emulator import load_profile
from kvberth.emulator.profile import Timing
from kvberth.emulator.timing import Step, step_seconds

TIMING = Timing(step_us=1000.0, sequence_us=100.0, context_token_ns=10.0, prompt_token_us=2.0, prompt_pair_ps=500.0)


@pytest.mark.parametrize(
    ("chunks", "step"),
    [
        ([], Step()),
        ([(100, 1)], Step(sequences=1, context_tokens=100)),
        ([(100, 1), (7, 1)], Step(sequences=2, context_tokens=107)),
        ([(0, 10)], Step(prompt_tokens=10, prompt_pairs=50.0)),
        ([(0, 1)], Step(prompt_tokens=1, prompt_pairs=0.5)),
        ([(30, 10)], Step(prompt_tokens=10, prompt_pairs=350.0)),
        ([(30, 10), (0, 4), (9, 1)], Step(sequences=1, context_tokens=9, prompt_tokens=14, prompt_pairs=358.0)),
    ],
)
def test_a_step_is_what_its_chunks_are(chunks, step):
    """One token after others decodes; all else is a prompt, with a pair for each token before each of its own."""
    assert Step.of(chunks) == step


@pytest.mark.parametrize(
    ("chunks", "microseconds"),
    [
        ([], 1000.0),
        ([(20_000, 1)], 1000.0 + 100.0 + 200.0),
        ([(20_000, 1), (10_000, 1)], 1000.0 + 200.0 + 300.0),
        ([(0, 1000)], 1000.0 + 2000.0 + 250.0),
        ([(1000, 1000)], 1000.0 + 2000.0 + 750.0),
        ([(1000, 1000), (20_000, 1)], 1000.0 + 2000.0 + 750.0 + 100.0 + 200.0),
    ],
)
def test_time_by_hand(chunks, microseconds):
    """Each term, and all of them together."""
    assert step_seconds(TIMING, Step.of(chunks)) == pytest.approx(microseconds * 1e-6, rel=1e-12)


@given(st.lists(st.integers(2, 5000), min_size=1, max_size=20))
def test_chunks_have_the_pairs_of_the_whole(chunks):
    """However a prompt is chunked, its tokens see n * n / 2 pairs in all, and are n."""
    length, before, tokens, pairs = sum(chunks), 0, 0, 0.0
    for count in chunks:
        step = Step.of([(before, count)])
        tokens, pairs, before = tokens + step.prompt_tokens, pairs + step.prompt_pairs, before + count
    assert (tokens, pairs) == (length, length * length / 2)


CHUNKS = st.lists(st.tuples(st.integers(0, 50_000), st.integers(1, 8192)), max_size=10)


@given(CHUNKS, st.randoms(use_true_random=False))
def test_the_order_of_sequences_does_not_matter(chunks, random):
    """A batch is a sum."""
    shuffled = list(chunks)
    random.shuffle(shuffled)
    assert Step.of(shuffled) == Step.of(chunks)


@given(CHUNKS, CHUNKS)
def test_a_step_of_both_costs_both(one, other):
    """But for what every step costs once."""
    both = step_seconds(TIMING, Step.of([*one, *other]))
    apart = step_seconds(TIMING, Step.of(one)) + step_seconds(TIMING, Step.of(other))
    assert both == pytest.approx(apart - TIMING.step_us * 1e-6, rel=1e-9)


@given(st.lists(st.integers(0, 10_000), min_size=4, max_size=4))
def test_time_is_linear_in_its_coefficients(counts):
    """Least squares rely on it: the time is the sum of coefficients times features."""
    step = Step(*counts)
    coefficients = [getattr(TIMING, name) for name in TIMING.__struct_fields__]
    expected = sum(value * feature for value, feature in zip(coefficients, step.features(), strict=True))
    assert step_seconds(TIMING, step) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("context", [1024, 2048, 4096, 8192, 16_384])
def test_qwen3_decodes_one_sequence_as_published(context):
    """5.6 to 5.8 ms per token at light load, from 1k to 16k tokens of context."""
    timing = load_profile("qwen3-32b-8xh200").timing
    assert 5.6e-3 <= step_seconds(timing, Step.of([(context, 1)])) <= 5.8e-3


def test_qwen3_decodes_seven_sequences_as_published():
    """About 7 ms per token where seven sequences of 16k run, as at 8 requests per second."""
    timing = load_profile("qwen3-32b-8xh200").timing
    assert step_seconds(timing, Step.of([(16_384, 1)] * 7)) == pytest.approx(7.0e-3, abs=0.2e-3)


def test_qwen3_reads_a_prompt_of_16k_in_its_time():
    """115 ms in two chunks, so that one prefill worker serves eight per second."""
    timing = load_profile("qwen3-32b-8xh200").timing
    chunks = [[(0, 8192)], [(8192, 8192)]]
    assert sum(step_seconds(timing, Step.of(each)) for each in chunks) == pytest.approx(0.115, rel=0.02)
