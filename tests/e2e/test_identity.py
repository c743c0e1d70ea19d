"""The answers are those of one undivided engine, token for token."""

import pytest
from tests.e2e.client import Client, Metrics, assert_nothing_left, eventually, prompt_of

from kvberth.launch import LocalCluster

LENGTHS = (5, 31, 32, 33, 300, 2000)
AT_ONCE = (5, 31, 32, 33, 300, 2000, 64, 1000)
MODES = pytest.mark.parametrize("mode", ["push", "pull"])


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, ...], str]:
    """Answers of the undivided engine, which do not depend on the cluster that it is in."""
    return {}


def compare(
    cluster: LocalCluster,
    expected: dict[tuple[int, ...], str],
    mode: str,
    *,
    seed: int,
    at_once: bool,
) -> None:
    """The same prompts through the router and on the undivided engine."""
    router, undivided = Client(cluster.router_url, "smollm2"), Client(cluster.undivided[0].url, "smollm2")
    tokens = undivided.tokens()
    prompts = [prompt_of(tokens, length, seed + at) for at, length in enumerate(AT_ONCE if at_once else LENGTHS)]
    for prompt in prompts:
        if tuple(prompt) not in expected:
            expected[tuple(prompt)] = undivided.complete(prompt)
    metrics = Metrics(cluster.decode[0].url)
    before = metrics.transfers(end="completed", mode=mode, role="consumer"), metrics.transfers(role="consumer")
    answers = router.complete_all(prompts, mode, num_threads=len(prompts) if at_once else 1)
    wanted = [expected[tuple(prompt)] for prompt in prompts]
    differing = [len(prompt) for prompt, one, two in zip(prompts, answers, wanted, strict=True) if one != two]
    assert not differing, f"prompts of {differing} tokens got other answers"
    # All of them were handed over, none was recomputed behind our back.
    eventually(lambda: metrics.transfers(role="consumer") - before[1] == len(prompts), 5, "all transfers are counted")
    assert metrics.transfers(end="completed", mode=mode, role="consumer") - before[0] == len(prompts)
    assert_nothing_left(cluster)


@MODES
def test_alone(cluster, expected, mode):
    """Prompts around the edge of a block, one after the other; P and D see each for the first time."""
    compare(cluster, expected, mode, seed=0 if mode == "push" else 20, at_once=False)


@MODES
def test_eight_at_once(cluster, expected, mode):
    """Eight prompts of all lengths in one batch."""
    compare(cluster, expected, mode, seed=40 if mode == "push" else 60, at_once=True)


@MODES
def test_shared_prefix_with_caches(cluster, undivided, router, decode_metrics, mode):
    """P and D hold the beginning of the prompt already: only the tail moves, and the answer is the same."""
    tokens = undivided.tokens()
    first = prompt_of(tokens, 320, 80 if mode == "push" else 81)
    second = [*first[:256], *tokens[5:60]]
    router.complete(first, mode)
    before = decode_metrics.value("kvberth:transfer_bytes_total", mode=mode, role="consumer")
    assert router.complete(second, mode) == undivided.complete(second)
    blocks = -(-len(second) // 32) - 8
    expected = before + blocks * 32 * 30 * 2 * 3 * 64 * 4  # tokens, layers, K and V, heads, head size, bytes
    name = "kvberth:transfer_bytes_total"
    eventually(lambda: decode_metrics.value(name, mode=mode, role="consumer") == expected, 5, "only the tail moved")


@MODES
def test_whole_prompt_cached_on_the_decode_worker(cluster, undivided, router, mode):
    """The same prompt again: what D holds of it is not moved, and nothing is left on P."""
    prompt = prompt_of(undivided.tokens(), 96, 90 if mode == "push" else 91)
    answers = {router.complete(prompt, mode) for _ in range(3)} | {undivided.complete(prompt)}
    assert len(answers) == 1
    assert_nothing_left(cluster)


@MODES
def test_alone_without_prefix_caching(cluster_without_caching, expected, mode):
    """The same with prefix caching off on every engine."""
    compare(cluster_without_caching, expected, mode, seed=0 if mode == "push" else 20, at_once=False)


@MODES
def test_eight_at_once_without_prefix_caching(cluster_without_caching, expected, mode):
    """The same with prefix caching off on every engine."""
    compare(cluster_without_caching, expected, mode, seed=40 if mode == "push" else 60, at_once=True)
