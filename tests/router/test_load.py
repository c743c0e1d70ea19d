"""An engine's load as it says it, and its rate as the router measures it."""

import pytest

from kvberth.router.load import EngineLoad, Held, OwnPrompts, PrefillRate, parse_load

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 900.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000",num_cpu_blocks="None"} 1.0
broken line that is not ours {
"""
SECOND_RANK = """\
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="1000"} 1.0
"""


def parse(page):
    return parse_load(page, read_at=7.0, held=Held(1, 100))


def test_load_is_found_among_vllms_metrics():
    """Four of its lines matter; names that only begin like them do not."""
    assert parse(PAGE) == EngineLoad(7.0, Held(1, 100), running=3, waiting=2, kv_usage=0.25, kv_capacity_tokens=16_000)


def test_whether_prefixes_are_kept_is_told():
    """In the label that vLLM has for it."""
    page = PAGE.replace('block_size="16",', 'block_size="16",enable_prefix_caching="True",')
    assert (parse(PAGE).keeps_prefixes, parse(page).keeps_prefixes) == (False, True)


def test_prompts_that_are_computed_there_are_told_from_those_that_came():
    """Of all ranks; an engine that does not say has computed none."""
    page = PAGE + "".join(
        f'vllm:prompt_tokens_by_source_total{{engine="{rank}",model_name="m",source="{source}"}} {tokens}\n'
        for rank in (0, 1)
        for source, tokens in (("local_compute", 100.0), ("local_cache_hit", 7.0), ("external_kv_transfer", 9000.0))
    )
    assert (parse(PAGE).computed_tokens, parse(page).computed_tokens) == (0, 200)


def own_prompts(*readings):
    own = OwnPrompts()
    for read_at, tokens in readings:
        own.add(EngineLoad(read_at, Held(), 0, 0, 0.0, None, computed_tokens=tokens))
    return own.tokens_per_second


def test_own_prompts_are_counted_over_the_last_second():
    """Or since the reading before it: what lies longer back is over."""
    assert own_prompts() == own_prompts((0.0, 5000)) == 0
    assert own_prompts((0.0, 5000), (0.1, 6000)) == 1000
    assert own_prompts((0.0, 5000), (2.0, 9000)) == 2000
    assert own_prompts((0.0, 5000), (1.0, 9000), (1.5, 9000), (1.9, 9100)) == pytest.approx(4100 / 1.9)
    assert own_prompts((0.0, 5000), (1.0, 9000), (1.5, 9000), (2.5, 9000)) == 0


def test_own_prompts_of_a_restarted_engine_are_counted_anew():
    """Its counter is less than it was."""
    assert own_prompts((0.0, 5000), (1.0, 100), (2.0, 400)) == 300


def test_data_parallel_ranks_are_one_engine():
    """Requests and blocks are added up, usage is that of all."""
    load = parse(PAGE + SECOND_RANK)
    assert (load.running, load.waiting, load.kv_usage, load.kv_capacity_tokens) == (4, 2, 0.5, 32_000)


def test_the_first_and_the_last_line_count():
    """Wherever the page begins, and if it ends without a line break."""
    lines = [line for line in PAGE.splitlines() if line.startswith("vllm:")]
    assert parse("\n".join(lines)) == parse("\r\n".join([*lines[::-1], ""])) == parse(PAGE)


@pytest.mark.parametrize("blocks", ['num_gpu_blocks="None"', 'num_gpu_blocks="0"', 'other="1"'])
def test_an_engine_may_not_say_how_many_blocks_it_has(blocks):
    """The rest is of use still."""
    load = parse(PAGE.replace('num_gpu_blocks="1000"', blocks))
    assert (load.kv_capacity_tokens, load.running) == (None, 3)


@pytest.mark.parametrize(
    ("gone", "instead", "problem"),
    [
        ("vllm:num_requests_running", "x", "num_requests_running"),
        ("vllm:num_requests_waiting{", "x{", "num_requests_waiting"),
        ("vllm:kv_cache_usage_perc", "x", "kv_cache_usage_perc"),
        ("0.25", "NaN", "kv_cache_usage_perc"),
        ("3.0", "+Inf", "num_requests_running"),
        ("2.0", "many", "many"),
    ],
)
def test_a_page_without_a_figure_is_no_reading(gone, instead, problem):
    """Nobody is chosen by half of a reading."""
    with pytest.raises(ValueError, match=problem):
        parse(PAGE.replace(gone, instead))


def test_the_rate_is_not_known_before_the_first_leg():
    """Nothing is made up."""
    rate = PrefillRate()
    assert (rate.tokens_per_second, rate.tokens_per_leg) == (None, None)


def test_legs_one_after_another_are_timed_without_their_waiting():
    """The second leg came with the first and waited for it: it took one second and not two."""
    rate = PrefillRate()
    rate.add(1000, started_at=0.0, ended_at=1.0)
    rate.add(1000, started_at=0.0, ended_at=2.0)
    assert rate.tokens_per_second == pytest.approx(1000)
    assert rate.tokens_per_leg == pytest.approx(1000)


def test_legs_of_one_batch_share_its_time():
    """Four that end together after a second are four thousand tokens a second, within the weight of the past."""
    rate = PrefillRate()
    for _ in range(4):
        rate.add(1000, started_at=0.0, ended_at=1.0)
    assert rate.tokens_per_second == pytest.approx(4000, rel=0.2)


def test_the_rate_follows_what_happens_now():
    """An engine that has become slow is known as slow after some legs."""
    rate = PrefillRate()
    now = 0.0
    for seconds in [0.1] * 50 + [1.0] * 50:
        rate.add(1000, started_at=now, ended_at=now + seconds)
        now += seconds
    assert rate.tokens_per_second == pytest.approx(1000, rel=0.05)
