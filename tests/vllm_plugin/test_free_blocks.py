"""vLLM's free list in order: its own block pool, as an engine uses it."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")


from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from kvberth.vllm_plugin.free_blocks import FreeBlocks


def pool_of(num_blocks: int, *, caching: bool) -> BlockPool:
    return BlockPool(num_blocks, enable_caching=caching, hash_block_size=16)


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


def free_ids(pool: BlockPool) -> list[int]:
    return ids(pool.free_block_queue.get_all_free_blocks())


def scramble(pool: BlockPool) -> None:
    """Three requests come and go, each freed in reversed order as vLLM does."""
    first, second, third = (pool.get_new_blocks(4) for _ in range(3))
    for blocks in (second, first, third):
        pool.free_blocks(reversed(blocks))


def test_a_prompt_gets_neighbours():
    """Freed in any order, handed out in rising order."""
    pool = pool_of(20, caching=False)
    scramble(pool)
    assert free_ids(pool) != sorted(free_ids(pool))
    FreeBlocks(pool).sort()
    assert free_ids(pool) == list(range(1, 20))
    assert pool.get_num_free_blocks() == 19
    assert ids(pool.get_new_blocks(6)) == [1, 2, 3, 4, 5, 6]


def test_cached_blocks_stay_in_the_order_of_their_eviction():
    """Only those without a hash are sorted, which come first."""
    pool = pool_of(20, caching=True)
    cached = pool.get_new_blocks(4)
    others = pool.get_new_blocks(8)
    for number, block in enumerate(cached):
        block.set_block_hash(make_block_hash_with_group_id(BlockHash(bytes([number]) * 32), 0), 16)
    pool.free_blocks(reversed(cached))
    pool.free_blocks(reversed(others))
    before = free_ids(pool)
    FreeBlocks(pool).sort()
    after = free_ids(pool)
    hashed = [block_id for block_id in before if pool.blocks[block_id].block_hash is not None]
    assert sorted(hashed) == sorted(ids(cached))
    assert [block_id for block_id in after if block_id in hashed] == hashed
    count = next(at for at, block_id in enumerate(before) if block_id in hashed)
    assert count > 1
    assert after[:count] == sorted(before[:count])
    assert after[count:] == before[count:]


def test_nothing_free_is_nothing_to_sort():
    """A full engine."""
    pool = pool_of(5, caching=False)
    held = pool.get_new_blocks(4)
    FreeBlocks(pool).sort()
    assert pool.get_num_free_blocks() == 0
    pool.free_blocks(held)
    assert pool.get_num_free_blocks() == 4
