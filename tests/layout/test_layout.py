"""Blocks to bytes: by examples and by properties."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvberth.layout import (
    Fingerprint,
    LayoutError,
    Region,
    Tokens,
    block_range,
    find_mismatch,
    merge_adjacent,
    num_blocks_for,
    plan_runs,
)


def dense(address: int, length: int = 100) -> Region:
    """A layer-major region: block b at address + b * length."""
    return Region(address=address, block_stride=length, block_length=length)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_at_the_edges(tokens, blocks):
    """One token more than a block needs one block more."""
    assert num_blocks_for(tokens, 16) == blocks


def test_range_of_a_tail():
    """Tokens 32 to 40 are the third block."""
    assert block_range(32, 40, 16) == (2, 3)
    assert block_range(0, 40, 16) == (0, 3)
    assert block_range(32, 32, 16) == (2, 2)


@pytest.mark.parametrize(("first", "tokens"), [(5, 40), (48, 40), (-16, 40)])
def test_range_refuses_what_cannot_be(first, tokens):
    """A tail begins at a block's edge and inside of the prompt."""
    with pytest.raises(ValueError, match=f"first_token {first}"):
        block_range(first, tokens, 16)


def test_neighbours_become_one_run():
    """Three neighbouring pairs are one descriptor per region."""
    runs = plan_runs([dense(1000)], [dense(5000)], [2, 3, 4], [7, 8, 9])
    assert runs.local.tolist() == [[1200, 300, 0]]
    assert runs.remote.tolist() == [[5700, 300, 0]]
    assert runs.num_bytes == 300


def test_reversed_blocks_are_sorted_first():
    """Freed blocks come back in reversed order; they are one run all the same."""
    assert len(plan_runs([dense(0)], [dense(0)], [4, 3, 2], [9, 8, 7])) == 1


def test_a_gap_on_either_side_breaks_the_run():
    """Both sides must be neighbours."""
    assert len(plan_runs([dense(0)], [dense(0)], [1, 2, 3], [1, 2, 9])) == 2
    assert len(plan_runs([dense(0)], [dense(0)], [1, 2, 9], [1, 2, 3])) == 2


def test_no_runs_in_a_region_with_gaps():
    """Where blocks do not touch, every block is a descriptor of its own."""
    sparse = Region(address=0, block_stride=300, block_length=100)
    runs = plan_runs([sparse], [dense(0)], [1, 2], [5, 6])
    assert runs.local.tolist() == [[300, 100, 0], [600, 100, 0]]
    assert runs.remote.tolist() == [[500, 100, 0], [600, 100, 0]]


def test_no_blocks_are_no_runs():
    """Nothing to move is not an error."""
    assert len(plan_runs([dense(0)], [dense(0)], [], [])) == 0


@pytest.mark.parametrize(
    ("local", "remote", "ours", "theirs", "text"),
    [
        ([dense(0)], [dense(0), dense(9)], [1], [1], "1 local regions, 2 remote"),
        ([dense(0)], [dense(0)], [1, 2], [1], "2 local blocks, 1 remote"),
        ([dense(0)], [dense(0, 50)], [1], [1], "100 bytes here and 50 there"),
        ([dense(0)], [dense(0)], [1, 1], [1, 2], "a local block is named twice"),
        ([dense(0)], [dense(0)], [1, 2], [3, 3], "a remote block is named twice"),
        ([], [], [1], [1], "no regions"),
    ],
)
def test_what_does_not_fit_is_refused(local, remote, ours, theirs, text):
    """The error says which two numbers do not fit."""
    with pytest.raises(LayoutError, match=text):
        plan_runs(local, remote, ours, theirs)


BLOCKS = st.lists(st.integers(0, 60), unique=True, max_size=40)


@given(st.data(), BLOCKS, st.integers(1, 3), st.sampled_from([(8, 8), (24, 8)]))
def test_every_byte_goes_to_its_place_once(data, local_blocks, num_regions, stride_and_length):
    """Copying along the runs is the same as copying block by block, and moves each byte once."""
    stride, length = stride_and_length
    remote_blocks = data.draw(st.permutations(range(61)))[: len(local_blocks)]
    size = 61 * stride
    local = [Region(address=i * size, block_stride=stride, block_length=length) for i in range(num_regions)]
    remote = [dense(i * 61 * length, length) for i in range(num_regions)]
    source = np.arange(num_regions * size, dtype=np.int64)
    expected = np.full(num_regions * 61 * length, -1, dtype=np.int64)
    for ours, theirs in zip(local, remote, strict=True):
        for here, there in zip(local_blocks, remote_blocks, strict=True):
            at, to = ours.address + here * stride, theirs.address + there * length
            expected[to : to + length] = source[at : at + length]
    actual = np.full_like(expected, -1)
    runs = plan_runs(local, remote, local_blocks, remote_blocks)
    for (at, count, _), (to, same, _) in zip(runs.local.tolist(), runs.remote.tolist(), strict=True):
        assert count == same
        assert (actual[to : to + count] == -1).all()
        actual[to : to + count] = source[at : at + count]
    assert (actual == expected).all()
    assert runs.num_bytes == len(local_blocks) * length * num_regions


def test_batches_are_the_same_descriptors():
    """Cutting a transfer in pieces loses nothing."""
    runs = plan_runs([dense(0)], [dense(0)], [1, 3, 5, 7, 9], [1, 3, 5, 7, 9])
    batches = runs.batches(2)
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert np.concatenate([batch.local for batch in batches]).tolist() == runs.local.tolist()


def test_layers_of_a_block_major_cache_become_one_region():
    """Pages of 100 bytes with a stride of three pages touch each other."""
    layers = [Region(address=1000 + 100 * layer, block_stride=300, block_length=100) for layer in range(3)]
    (region,) = merge_adjacent(layers)
    assert region == Region(address=1000, block_stride=300, block_length=300)
    assert region.is_contiguous


def test_layer_major_regions_stay_apart():
    """Layer 1 begins where layer 0 ends, but its pages do not lie between those of layer 0."""
    layers = [dense(1000), dense(1000 + 100 * 50)]
    assert merge_adjacent(layers) == tuple(layers)
    assert merge_adjacent([dense(0), dense(100)]) == (dense(0), dense(100))


def test_order_of_layers_is_kept():
    """Addresses differ between engines; the order of layers is what pairs them."""
    layers = [dense(9000), dense(1000), dense(5000)]
    assert merge_adjacent(layers) == tuple(layers)


FINGERPRINT = {
    "model": "m@1",
    "dtype": "float32",
    "kv_cache_dtype": "auto",
    "num_layers": 2,
    "num_kv_heads": 3,
    "head_size": 64,
    "block_size": 16,
    "layout": "LBHNC",
    "tensor_parallel_size": 1,
    "block_lengths": (128, 128),
    "tokens": Tokens(16, 2, 4),
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "other@2"),
        ("dtype", "bfloat16"),
        ("kv_cache_dtype", "fp8"),
        ("num_layers", 3),
        ("num_kv_heads", 4),
        ("head_size", 128),
        ("block_size", 24),
        ("layout", "BLHNC"),
        ("tensor_parallel_size", 2),
        ("block_lengths", (256,)),
        ("tokens", Tokens(16, 1, 4)),
        ("tokens", Tokens(16, 2, 8)),
        ("tokens", Tokens(12, 2, 4)),
        ("tokens", None),
    ],
)
def test_mismatch_names_field_and_both_values(field, value):
    """Each field is compared."""
    ours, theirs = Fingerprint(**FINGERPRINT), Fingerprint(**{**FINGERPRINT, field: value})
    mismatch = find_mismatch(producer=ours, consumer=theirs)
    assert mismatch is not None
    expected = f"{field} differs: prefill worker has {FINGERPRINT[field]}, decode worker has {value}"
    assert str(mismatch) == expected


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_block_sizes_may_differ_by_a_whole_factor(factor):
    """With the same bytes per token, and pages of the kernels that differ likewise."""
    changes = {"block_size": 16 * factor, "block_lengths": (128 * factor, 128 * factor)}
    ours, theirs = Fingerprint(**FINGERPRINT), Fingerprint(**{**FINGERPRINT, **changes})
    assert find_mismatch(producer=ours, consumer=theirs) is None
    assert find_mismatch(producer=theirs, consumer=ours) is None
    larger_pages = msgspec.structs.replace(theirs, tokens=Tokens(16 * factor, 2, 4))
    assert find_mismatch(producer=ours, consumer=larger_pages) is None
    assert not ours.has_blocks_like(larger_pages)


def test_block_sizes_must_be_equal_where_tokens_cannot_be_told_apart():
    """An attention backend with a memory layout of its own."""
    opaque = Fingerprint(**{**FINGERPRINT, "tokens": None})
    assert find_mismatch(opaque, opaque) is None
    larger = msgspec.structs.replace(opaque, block_size=32, block_lengths=(256, 256))
    mismatch = find_mismatch(producer=opaque, consumer=larger)
    assert mismatch is not None
    assert mismatch.field == "block_size"


def test_equal_engines_fit():
    """And nothing else is compared."""
    assert find_mismatch(Fingerprint(**FINGERPRINT), Fingerprint(**FINGERPRINT)) is None
