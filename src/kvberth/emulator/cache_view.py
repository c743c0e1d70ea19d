"""vLLM's KV cache tensors as one numpy array of words, whatever the layout."""

from collections.abc import Sequence

import numpy as np
import torch

from kvberth.emulator.canary import Words
from kvberth.emulator.profile import SLOT_BYTES

__all__ = ["words_of"]


def words_of(layers: Sequence[torch.Tensor]) -> Words:
    """The layers' tensors, each (blocks, head slots, tokens, content), as (layers, blocks, head slots, tokens).

    All layers lie in one allocation at equal distances, as `allocate_kv_cache` makes them. The result keeps it alive.

    Raises:
        ValueError: they do not.
    """
    first = layers[0]
    step = layers[1].data_ptr() - first.data_ptr() if len(layers) > 1 else 0
    size = first.element_size()
    strides = [stride * size for stride in first.stride()]
    for index, layer in enumerate(layers):
        if (
            layer.data_ptr() - first.data_ptr() != index * step
            or layer.shape != first.shape
            or layer.stride() != first.stride()
        ):
            raise ValueError(f"layer {index} of the KV cache does not lie where its neighbours suggest")
    if first.shape[3] * size != SLOT_BYTES or strides[3] != size:
        raise ValueError(f"a token has {first.shape[3] * size} bytes per head slot, not {SLOT_BYTES} together")
    storage = first.untyped_storage()
    return np.ndarray(
        shape=(len(layers), *first.shape[:3]),
        dtype=np.uint32,
        buffer=torch.empty(0, dtype=torch.uint8).set_(storage).numpy(),
        offset=first.data_ptr() - storage.data_ptr(),
        strides=(step, *strides[:3]),
    )
