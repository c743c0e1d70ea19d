"""From tensors to regions."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kvberth.layout import Region
from kvberth.vllm_plugin.regions import UnsupportedCacheError, regions_of


def names(count: int) -> list[str]:
    return [f"model.layers.{number}.self_attn.attn" for number in range(count)]


def test_layer_major_is_a_region_per_layer():
    """10 blocks of 3 heads x 16 tokens x 8 numbers of 4 bytes."""
    tensors = {name: torch.zeros(10, 3, 16, 8) for name in names(2)}
    regions = regions_of(tensors, 10)
    assert [region.block_length for region in regions] == [3 * 16 * 8 * 4] * 2
    assert [region.address for region in regions] == [tensor.data_ptr() for tensor in tensors.values()]
    assert all(region.is_contiguous for region in regions)


def test_layers_are_in_natural_order():
    """Layer 2 comes before layer 10, whatever the order of the dictionary."""
    tensors = {name: torch.zeros(4, 8) for name in reversed(names(12))}
    addresses = [tensors[name].data_ptr() for name in names(12)]
    assert [region.address for region in regions_of(tensors, 4)] == addresses


def test_block_major_is_one_region():
    """All layers of a block lie together, so they travel together."""
    storage = torch.zeros(10, 3, 8)
    tensors = {name: storage[:, layer] for layer, name in enumerate(names(3))}
    assert regions_of(tensors, 10) == (Region(address=storage.data_ptr(), block_stride=96, block_length=96),)


def test_smaller_kernel_blocks_are_joined():
    """The attention kernel's blocks are half of the engine's."""
    (region,) = regions_of({"layer.0": torch.zeros(20, 8)}, 10)
    assert region.block_length == 2 * 8 * 4


def test_permuted_interior_is_fine():
    """Heads before tokens or after: a block's bytes lie together all the same."""
    (region,) = regions_of({"layer.0": torch.zeros(10, 16, 3, 8).permute(0, 2, 1, 3)}, 10)
    assert region.block_length == 16 * 3 * 8 * 4


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(7, 8), "is not a multiple of the 10 blocks"),
        (torch.zeros(2, 10, 8).permute(1, 0, 2), "a block's bytes do not lie together"),
    ],
)
def test_what_cannot_be_addressed_is_refused(tensor, text):
    """With the layer's name and its shape."""
    with pytest.raises(UnsupportedCacheError, match=f"layer layer.0: .*{text}"):
        regions_of({"layer.0": tensor}, 10)
