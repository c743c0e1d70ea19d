"""From tokens to blocks."""

from collections.abc import Sequence

__all__ = ["block_range", "num_blocks_for", "units_of"]


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens, the last one perhaps partly filled."""
    return -(-num_tokens // block_size)


def block_range(first_token: int, num_tokens: int, block_size: int) -> tuple[int, int]:
    """Positions in the block table, from and to (exclusive), of the tokens from `first_token` up to `num_tokens`.

    Raises:
        ValueError: `first_token` is not at a block's edge, or lies beyond the prompt.
    """
    if first_token % block_size:
        raise ValueError(f"first_token {first_token} is not a multiple of the block size {block_size}")
    if not 0 <= first_token <= num_tokens:
        raise ValueError(f"first_token {first_token} is not within the prompt of {num_tokens} tokens")
    return first_token // block_size, num_blocks_for(num_tokens, block_size)


def units_of(blocks: Sequence[int], units_per_block: int, begin: int, end: int) -> tuple[int, ...]:
    """Units `begin` to `end` (exclusive) of a block table, counted from the begin of memory.

    A unit is a block where both engines have blocks of one size, else a block of the engine with the smaller ones.
    """
    if units_per_block == 1:
        return tuple(blocks[begin:end])
    return tuple(blocks[at // units_per_block] * units_per_block + at % units_per_block for at in range(begin, end))
