"""Whether the KV cache of one engine can be used by another."""

import msgspec

from kvberth.layout.pages import Tokens

__all__ = ["Fingerprint", "Mismatch", "find_mismatch"]


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal on both engines, but for the sizes of blocks. The field's name is what an error tells.

    Attributes:
        model: the model's name and a digest of its configuration.
        dtype: of the model's arithmetic.
        kv_cache_dtype: of the stored KV.
        num_layers: attention layers with a KV cache.
        num_kv_heads: of the whole model, over all ranks.
        head_size: elements per head.
        block_size: tokens per block.
        layout: vLLM's name of the KV cache layout, such as LBHNC.
        tensor_parallel_size: ranks that share one model.
        block_lengths: bytes of one block in each region.
        tokens: how a layer's tokens lie within a block; None where that is not known, and sizes must be equal.
    """

    model: str
    dtype: str
    kv_cache_dtype: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    layout: str
    tensor_parallel_size: int
    block_lengths: tuple[int, ...]
    tokens: Tokens | None = None

    def has_blocks_like(self, other: "Fingerprint") -> bool:
        """Whether a block here and a block there have the same bytes in the same order."""
        return self.block_size == other.block_size and self.tokens == other.tokens


class Mismatch(msgspec.Struct, frozen=True):
    """The first field in which two engines differ."""

    field: str
    producer_value: str
    consumer_value: str

    def __str__(self) -> str:
        return (
            f"{self.field} differs: prefill worker has {self.producer_value}, decode worker has {self.consumer_value}"
        )


_SIZES = {"block_size", "block_lengths", "tokens"}


def find_mismatch(producer: Fingerprint, consumer: Fingerprint) -> Mismatch | None:
    """The first field that differs, in the order of the class; None when the engines fit.

    Block sizes, and the attention kernels' page sizes, may differ by a whole factor.
    """
    has_like_blocks = producer.has_blocks_like(consumer)
    for field in Fingerprint.__struct_fields__:
        ours, theirs = getattr(producer, field), getattr(consumer, field)
        fits = ours == theirs if has_like_blocks or field not in _SIZES else _fits(field, producer, consumer)
        if not fits:
            return Mismatch(field, str(ours), str(theirs))
    return None


def _fits(field: str, producer: Fingerprint, consumer: Fingerprint) -> bool:
    """Whether a size is the same per token, and the tokens can be told apart."""
    ours, theirs = producer.tokens, consumer.tokens
    if field == "block_size":
        can_be_split = ours is not None and theirs is not None
        sizes = (producer.block_size, consumer.block_size)
        return sizes[0] == sizes[1] or (can_be_split and _is_multiple(*sizes))
    if field == "block_lengths":
        # Compared crosswise: a division would round.
        return [length * consumer.block_size for length in producer.block_lengths] == [
            length * producer.block_size for length in consumer.block_lengths
        ]
    return (
        ours is not None
        and theirs is not None
        and (ours.num_pieces, ours.token_bytes) == (theirs.num_pieces, theirs.token_bytes)
        and _is_multiple(ours.page_size, theirs.page_size)
    )


def _is_multiple(one: int, other: int) -> bool:
    return max(one, other) % min(one, other) == 0
