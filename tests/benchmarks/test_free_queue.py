"""The simulation of vLLM's free list: on the real list, nothing is lost, and what is cached keeps its place."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.free_queue import POLICIES, make_prompts, pool_size, runs_of, simulate, sort_unhashed
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

NEVER, BEFORE_EACH = POLICIES[0], POLICIES[-1]


def free_ids(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


def test_sorting_leaves_cached_blocks_in_the_order_of_their_eviction():
    """Only what lies before the first block with a hash is put in order."""
    pool = BlockPool(12, True, 16)
    taken = pool.get_new_blocks(11)
    for number in (3, 7, 5):
        hashed = make_block_hash_with_group_id(BlockHash(bytes([number])), 0)
        pool._insert_block_hash(hashed, pool.blocks[number], num_tokens=16)
    pool.free_blocks([pool.blocks[number] for number in (7, 3, 5)])
    pool.free_blocks([block for block in reversed(taken) if block.block_id not in {3, 5, 7}])
    assert free_ids(pool) == [11, 10, 9, 8, 6, 4, 2, 1, 7, 3, 5]
    assert sort_unhashed(pool) == 8
    assert free_ids(pool) == [1, 2, 4, 6, 8, 9, 10, 11, 7, 3, 5]
    assert pool.get_num_free_blocks() == 11


def test_without_prefix_caching_the_whole_list_is_sorted():
    """vLLM keeps hashes that it does not use."""
    pool = BlockPool(6, False, 16)
    pool.free_blocks(reversed(pool.get_new_blocks(4)))
    assert free_ids(pool) == [4, 3, 2, 1, 5]
    assert sort_unhashed(pool, limit=2) == 2
    assert free_ids(pool) == [3, 4, 2, 1, 5]
    assert sort_unhashed(pool) == 5
    assert free_ids(pool) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("caching", [False, True])
def test_every_prompt_gets_its_blocks_on_both_workers(caching):
    """As many as its tokens need, none of them twice, and both workers' tables fit each other."""
    pair = simulate(use=0.7, caching=caching, policy=NEVER, seed=3, prompts=40)
    tables = list(pair.transfers(warm_up=0))
    assert [len(ours) for ours, _ in tables] == [-(-prompt.num_tokens // 16) for prompt in pair.prompts]
    for ours, theirs in tables:
        assert len(set(ours)) == len(set(theirs)) == len(ours) == len(theirs)


def test_pools_are_as_full_as_asked_for():
    """Little's law holds for the simulated lives, on both workers."""
    pair = simulate(use=0.5, caching=False, policy=NEVER, seed=1, prompts=300)
    assert pair.decode.use == pytest.approx(0.5, abs=0.08)
    assert pair.prefill.use == pytest.approx(0.5, abs=0.08)


def test_sorting_makes_fewer_runs():
    """What the benchmark is there to measure."""
    runs = [
        sum(
            runs_of(*each)
            for each in simulate(use=0.7, caching=False, policy=policy, seed=1, prompts=200).transfers(100)
        )
        for policy in (NEVER, BEFORE_EACH)
    ]
    assert runs[1] < runs[0] / 2


def test_runs_need_neighbours_on_both_sides():
    """In whatever order the pairs come."""
    assert runs_of([7, 6, 5], [3, 2, 1]) == 1
    assert runs_of([5, 6, 7], [1, 2, 9]) == 2


def test_pool_size_follows_the_traffic():
    """Half the use, twice the pool; twice the rate, twice the pool."""
    prompts = make_prompts(50, 8.0, (1024, 16384), seed=1)
    size = pool_size(prompts, 0.8, 8.0)
    assert pool_size(prompts, 0.4, 8.0) == pytest.approx(2 * size, abs=1)
    assert pool_size(prompts, 0.8, 16.0) == pytest.approx(2 * size, abs=1)
