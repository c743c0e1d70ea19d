"""vLLM's tensors as one array of words."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tests.emulator.rig import make_bases, make_blocks, make_tokens

from kvberth.emulator.cache_view import words_of
from kvberth.emulator.canary import Canary

LAYERS, BLOCKS, SLOTS, TOKENS = 3, 10, 2, 16
ORDERS = {"LBHNC": (0, 1, 2, 3, 4), "BLHNC": (1, 0, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "BHLNC": (1, 2, 0, 3, 4)}
DTYPES = {"int8": torch.int8, "bfloat16": torch.bfloat16, "int32": torch.int32}


def make_layers(order: str, dtype: str = "int8", slots: int = SLOTS, offset: int = 0) -> list:
    """Views of one allocation of bytes, one per layer: (blocks, head slots, tokens, content), as vLLM makes them."""
    shape = (LAYERS, BLOCKS, slots, TOKENS, 4)
    buffer = torch.zeros(offset + int(np.prod(shape)), dtype=torch.int8)
    physical = ORDERS[order]
    dense = buffer[offset:].view([shape[axis] for axis in physical])
    logical = dense.permute([physical.index(axis) for axis in range(5)])
    return [layer.view(DTYPES[dtype]) for layer in logical]


def bytes_of(layers: list) -> np.ndarray:
    """What vLLM's tensors hold, copied: (layers, blocks, head slots, tokens, 4)."""
    return np.stack([layer.contiguous().view(torch.int8).numpy().copy() for layer in layers])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("offset", [0, 64])
def test_every_word_has_its_place(order, dtype, slots, offset):
    """A word that is written into the array is in the tensor of its layer, block, head slot and token."""
    layers = make_layers(order, dtype, slots, offset)
    words = words_of(layers)
    assert words.shape == (LAYERS, BLOCKS, slots, TOKENS)
    numbers = np.random.default_rng(0).integers(0, 2**32, words.shape, dtype=np.uint32)
    words[:] = numbers
    assert (bytes_of(layers).view(np.uint32)[..., 0] == numbers).all()


@pytest.mark.parametrize("order", ORDERS)
def test_what_vllm_writes_is_seen(order):
    """It is the same memory, both ways: what a peer puts into a tensor is in the array."""
    layers = make_layers(order)
    words = words_of(layers)
    layers[1][4, 1, 7] = torch.tensor([0x78, 0x56, 0x34, 0x12], dtype=torch.int8)
    assert words[1, 4, 1, 7] == 0x12345678
    assert np.count_nonzero(words) == 1


@pytest.mark.parametrize("order", ORDERS)
def test_a_canary_lives_in_it(order):
    """Whatever the layout is: what it has written lies in the tensors' blocks and verifies."""
    layers = make_layers(order)
    canary = Canary(words_of(layers))
    blocks, bases = make_blocks(4, blocks=BLOCKS), make_bases(make_tokens(60))
    canary.write(blocks, 0, bases)
    assert canary.verify(blocks, 0, bases) is None
    assert sorted(np.flatnonzero(bytes_of(layers).any(axis=(0, 2, 3, 4)))) == sorted(blocks)


def test_one_layer_is_enough():
    """There is no distance between layers then."""
    layers = make_layers("LBHNC")[:1]
    words = words_of(layers)
    words[:] = 5
    assert (bytes_of(layers).view(np.uint32) == 5).all()


def refused(layers: list, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        words_of(layers)


def test_layers_in_disorder_are_refused():
    """The distances are not equal; the first one that does not fit is named."""
    first, second, third = make_layers("LBHNC")
    refused([first, third, second], "layer 2 of the KV cache does not lie where its neighbours suggest")


def test_layers_of_other_shapes_are_refused():
    """A cache of which one layer has fewer blocks."""
    first, second, third = make_layers("LBHNC")
    refused([first, second, third[:-1]], "layer 2 of the KV cache does not lie")


def test_layers_of_other_strides_are_refused():
    """A layer that has its heads behind its tokens."""
    first, second, third = make_layers("LBHNC")
    other = torch.as_strided(second, second.shape, (second.stride(0), 4, 8, 1), second.storage_offset())
    refused([first, other, third], "layer 1 of the KV cache does not lie")


@pytest.mark.parametrize("content", [2, 8])
def test_tokens_of_other_sizes_are_refused(content):
    """An emulated token has four bytes per head slot."""
    buffer = torch.zeros(LAYERS, BLOCKS, SLOTS, TOKENS, content, dtype=torch.int8)
    refused(list(buffer), f"a token has {content} bytes per head slot, not 4 together")


def test_scattered_tokens_are_refused():
    """Four bytes that do not lie together are no word."""
    buffer = torch.zeros(LAYERS, BLOCKS, SLOTS, TOKENS, 8, dtype=torch.int8)
    refused(list(buffer[..., ::2]), "not 4 together")
