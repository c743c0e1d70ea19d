"""Whether the KV cache of one engine can be used by another."""

import msgspec

__all__ = ["Fingerprint", "Mismatch", "find_mismatch"]


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal on both engines. The field's name is what an error tells.

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


class Mismatch(msgspec.Struct, frozen=True):
    """The first field in which two engines differ."""

    field: str
    producer_value: str
    consumer_value: str

    def __str__(self) -> str:
        return (
            f"{self.field} differs: prefill worker has {self.producer_value}, decode worker has {self.consumer_value}"
        )


def find_mismatch(producer: Fingerprint, consumer: Fingerprint) -> Mismatch | None:
    """The first field that differs, in the order of the class; None when the engines fit."""
    for field in Fingerprint.__struct_fields__:
        ours, theirs = getattr(producer, field), getattr(consumer, field)
        if ours != theirs:
            return Mismatch(field, str(ours), str(theirs))
    return None
