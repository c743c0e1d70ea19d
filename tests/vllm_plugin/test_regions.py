"""From tensors to regions, and from tensors of one engine to those of another."""

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

from kvberth.layout import Region, Tokens, TokenSpace, plan_tokens, units_of
from kvberth.vllm_plugin.regions import UnsupportedCacheError, regions_of, tokens_of


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


@pytest.mark.parametrize(
    ("tensor", "tokens"),
    [
        (torch.zeros(10, 3, 16, 8), Tokens(page_size=16, num_pieces=3, token_bytes=32)),
        (torch.zeros(10, 16, 3, 8).permute(0, 2, 1, 3), Tokens(page_size=16, num_pieces=1, token_bytes=96)),
        (torch.zeros(20, 3, 8, 8), Tokens(page_size=8, num_pieces=3, token_bytes=32)),
        (torch.zeros(10, 3, 8, 8), None),
        (torch.zeros(10, 48, 8), None),
        (torch.zeros(10, 3, 16, 9)[..., :8], None),
    ],
)
def test_strides_tell_how_tokens_lie(tensor, tokens):
    """Heads before tokens, tokens before heads, small pages; None for what is not vLLM's."""
    assert tokens_of({"layer.0": tensor}, 10, 16, {"FLASH_ATTN"}) == tokens


def test_backends_that_pack_tokens_are_not_believed():
    """The CPU's tensors look the same, and hold the keys otherwise: a handoff by tokens gave wrong answers."""
    assert tokens_of({"layer.0": torch.zeros(10, 3, 16, 8)}, 10, 16, {"CPU_ATTN"}) is None


def test_layers_that_differ_have_no_common_answer():
    """Then block sizes must be equal."""
    assert tokens_of({"layer.0": torch.zeros(10, 3, 16, 8), "layer.1": torch.zeros(10, 4, 16, 8)}, 10, 16, ()) is None


ORDERS = {"LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "BLHNC": (1, 0, 2, 3, 4), "BLNHC": (1, 0, 3, 2, 4)}
LAYERS, HEADS, CONTENT = 2, 3, 4


class Cache:
    """One engine's KV cache in one of vLLM's memory layouts, a number of its own in each place."""

    def __init__(self, layout: str, num_blocks: int, block_size: int, page_size: int) -> None:
        self.block_size, self.page_size = block_size, page_size
        order = ORDERS[layout]
        logical = (LAYERS, num_blocks * (block_size // page_size), HEADS, page_size, CONTENT)
        storage = torch.zeros([logical[axis] for axis in order], dtype=torch.int32)
        self.cache = storage.permute([order.index(axis) for axis in range(5)])
        layers = {f"layer.{number}": self.cache[number] for number in range(LAYERS)}
        tokens = tokens_of(layers, num_blocks, block_size, {"EMULATED"})
        assert tokens is not None
        self.space = TokenSpace(regions_of(layers, num_blocks), block_size, tokens)

    def token(self, blocks: list[int], position: int) -> torch.Tensor:
        """The numbers of a request's token: shape (LAYERS, HEADS, CONTENT), a view."""
        block, within = blocks[position // self.block_size], position % self.block_size
        page = block * (self.block_size // self.page_size) + within // self.page_size
        return self.cache[:, page, :, within % self.page_size]


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Block and page size of both engines, each pair a whole factor apart."""
    pages = [4 * draw(st.sampled_from([1, 2])) for _ in range(2)]
    blocks = [8 * draw(st.sampled_from([1, 2])), 8 * draw(st.sampled_from([1, 2, 4]))]
    blocks[1] = max(blocks[1], blocks[0]) if draw(st.booleans()) else blocks[1]
    return blocks[0], pages[0], blocks[1], pages[1]


@settings(max_examples=150)
@given(st.sampled_from(list(ORDERS)), sizes(), st.data())
def test_every_token_finds_its_place_in_blocks_of_another_size(layout, sizes, data):
    """Tokens from D's first missing one on are copied along the descriptors; all others stay as they are."""
    size_p, page_p, size_d, page_d = sizes
    if layout.startswith("B"):  # blocks in pages are refused there: the layers' pages would be scattered
        page_p, page_d = size_p, size_d
    num_tokens = data.draw(st.integers(1, 60))
    first = data.draw(st.integers(0, (num_tokens - 1) // size_d)) * size_d
    producer, consumer = Cache(layout, 12, size_p, page_p), Cache(layout, 12, size_d, page_d)
    blocks_p = data.draw(st.permutations(range(12)))[: -(-num_tokens // size_p)]
    blocks_d = data.draw(st.permutations(range(12)))[: -(-num_tokens // size_d)]
    for position in range(num_tokens):
        producer.token(blocks_p, position)[:] = torch.arange(LAYERS * HEADS * CONTENT).reshape(LAYERS, HEADS, CONTENT)
        producer.token(blocks_p, position)[:] += 1000 * (position + 1)
    unit = min(size_p, size_d)
    begin, end = first // unit, -(-num_tokens // unit)
    local = units_of(blocks_p, size_p // unit, begin, end)
    remote = units_of(blocks_d, size_d // unit, begin, end)
    runs = plan_tokens(producer.space, consumer.space, local, remote, unit)
    for (source, length, _), (target, same, _) in zip(runs.local.tolist(), runs.remote.tolist(), strict=True):
        assert length == same
        ctypes.memmove(target, source, length)
    for position in range(num_tokens):
        wanted = producer.token(blocks_p, position) if position >= first else torch.zeros(LAYERS, HEADS, CONTENT)
        assert (consumer.token(blocks_d, position) == wanted).all()
    others = [block for block in range(12) if block not in blocks_d]
    pages = size_d // page_d
    for block in others:
        assert (consumer.cache[:, block * pages : (block + 1) * pages] == 0).all()


def test_whole_pages_of_equal_size_are_one_descriptor_each():
    """Blocks of 32 into scattered blocks of 16, pages of 16 on both sides: a descriptor per layer and page."""
    large, small = Cache("LBHNC", 12, 32, 16), Cache("LBHNC", 12, 16, 16)
    runs = plan_tokens(large.space, small.space, units_of([5, 2], 2, 0, 4), units_of([9, 7, 3, 1], 1, 0, 4), 16)
    assert len(runs) == LAYERS * 4
    assert set(runs.local[:, 1].tolist()) == {HEADS * 16 * CONTENT * 4}
