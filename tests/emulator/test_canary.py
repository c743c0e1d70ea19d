"""What a cache holds in place of keys and values: right words verify, and wrong ones are named."""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.emulator.rig import (
    BLOCK_SIZE,
    BLOCKS,
    LAYERS,
    LAYOUTS,
    blocks_for,
    make_bases,
    make_blocks,
    make_tokens,
    make_words,
    split,
)

from kvberth.emulator.canary import Canary, Corruption, bases_of, extend_sum, extend_sums, next_value

BOTH = pytest.mark.parametrize("layout", LAYOUTS)
LENGTH = 72
"""Four blocks and a half."""
CUTS = st.lists(st.integers(0, 10_000), max_size=8)
BITS_64 = st.integers(0, 2**64 - 1)


class Scene:
    """A cache with one context in it."""

    def __init__(self, layout: str = "layer-major", length: int = LENGTH, **shape: int) -> None:
        self.words = make_words(layout, **shape)
        self.canary = Canary(self.words)
        self.blocks = make_blocks(blocks_for(length), seed=3, blocks=self.words.shape[1])
        self.bases = make_bases(make_tokens(length, seed=1))
        self.canary.write(self.blocks, 0, self.bases)

    def verify(self, start: int = 0) -> Corruption | None:
        return self.canary.verify(self.blocks, start, self.bases[start:])

    def flip(self, layer: int, position: int, head: int, bit: int) -> None:
        block = self.blocks[position // BLOCK_SIZE]
        self.words[layer, block, head, position % BLOCK_SIZE] ^= np.uint32(1 << bit)

    def place(self, layer: int, position: int) -> tuple[int, int, int, int]:
        """What a corruption there is called."""
        return layer, int(self.blocks[position // BLOCK_SIZE]), position % BLOCK_SIZE, position


def place_of(found: Corruption | None) -> tuple[int, int, int, int]:
    assert found is not None, "nothing was found"
    return found.layer, found.block, found.slot, found.position


FLIPS = st.tuples(st.integers(0, LAYERS - 1), st.integers(0, LENGTH - 1), st.integers(0, 1), st.integers(0, 31))


# What was written verifies.


def mix(value: int) -> int:
    """splitmix64's finalizer, from the paper, in plain integers."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


@BOTH
def test_words_are_those_of_the_formula(layout):
    """The module's formula, computed word by word; the lower half is in the first head slot."""
    scene = Scene(layout)
    total = 0
    for position, token in enumerate(make_tokens(LENGTH, seed=1).tolist()):
        total += mix((token * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03) % 2**64)
        for layer in range(LAYERS):
            word = mix(total % 2**64) ^ mix((layer + 1) * 0x8CB92BA72F3D8DD7 % 2**64)
            _, block, slot, _ = scene.place(layer, position)
            assert scene.words[layer, block, :, slot].tolist() == [word % 2**32, word >> 32]


@BOTH
@given(st.data(), st.integers(1, 150), CUTS, CUTS)
def test_what_was_written_verifies(layout, data, length, writes, reads):
    """Any block table, any chunks of the writes, and any other chunks of the verification."""
    words = make_words(layout)
    canary, bases = Canary(words), make_bases(make_tokens(length))
    blocks = np.array(data.draw(st.permutations(range(BLOCKS)))[: blocks_for(length)], dtype=np.int64)
    start = 0
    for count in split(length, writes):
        canary.write(blocks, start, bases[start : start + count])
        start += count
    start = 0
    for count in split(length, reads):
        assert canary.verify(blocks, start, bases[start : start + count]) is None
        start += count


@BOTH
@given(st.integers(1, 150), CUTS)
def test_chunks_make_the_same_words(layout, length, cuts):
    """The cache is the same to the last bit however the prompt was chunked."""
    at_once, in_chunks = make_words(layout), make_words(layout)
    blocks, bases = make_blocks(blocks_for(length)), make_bases(make_tokens(length))
    Canary(at_once).write(blocks, 0, bases)
    start = 0
    for count in split(length, cuts):
        Canary(in_chunks).write(blocks, start, bases[start : start + count])
        start += count
    assert (at_once == in_chunks).all()


@BOTH
def test_decoded_tokens_make_the_same_words(layout):
    """A batch of single tokens is written as a chunk would be."""
    scene, words = Scene(layout), make_words(layout)
    positions = np.random.default_rng(0).permutation(LENGTH)
    Canary(words).write_tokens(scene.blocks[positions // BLOCK_SIZE], positions % BLOCK_SIZE, scene.bases[positions])
    assert (words == scene.words).all()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60), CUTS)
def test_sums_go_on_across_chunks(tokens, cuts):
    """The sums of a context are those of its chunks, each begun with the last one's sum."""
    array = np.array(tokens, dtype=np.uint32)
    sums, last, start = [], 0, 0
    for count in split(len(tokens), cuts):
        sums += extend_sums(last, start, array[start : start + count]).tolist()
        last, start = sums[-1], start + count
    assert sums == extend_sums(0, 0, array).tolist()


@given(BITS_64, st.integers(0, 2**20), st.integers(0, 2**32 - 1))
def test_one_token_s_sum_is_that_of_many(last, position, token):
    """What is quick for one token gives what the arrays give."""
    (expected,) = extend_sums(last, position, np.array([token], dtype=np.uint32)).tolist()
    assert extend_sum(last, position, token) == expected


def test_nothing_writes_nothing_and_is_right():
    """No tokens are no error."""
    scene = Scene()
    before = scene.words.copy()
    scene.canary.write(scene.blocks, 40, scene.bases[:0])
    assert (scene.words == before).all()
    assert scene.canary.verify(scene.blocks, 40, scene.bases[:0]) is None


@BOTH
def test_only_the_context_s_own_words_are_touched(layout):
    """Other blocks, and the slots behind the last token, stay as they were."""
    scene = Scene(layout)
    is_ours = np.zeros_like(scene.words, dtype=bool)
    for position in range(LENGTH):
        _, block, slot, _ = scene.place(0, position)
        is_ours[:, block, :, slot] = True
    assert ((scene.words != 0) == is_ours).all()
    scene.words[~is_ours] = 1
    assert scene.verify() is None


# What is wrong is named.


@BOTH
@given(FLIPS)
def test_a_flipped_bit_is_named(layout, flip):
    """Any bit, with its layer, block, slot and position, and what was expected there."""
    layer, position, head, bit = flip
    scene = Scene(layout)
    block, slot = scene.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
    expected = int(scene.words[layer, block, head, slot])
    scene.flip(*flip)
    found = scene.verify()
    assert place_of(found) == scene.place(layer, position)
    assert (found.expected, found.found, found.wrong_words) == (expected, expected ^ 1 << bit, 1)


@given(FLIPS, st.integers(0, LENGTH - 1))
def test_a_part_is_verified_for_itself(flip, start):
    """What is wrong before the part is not its business; what is wrong in it has its place in the whole."""
    layer, position, _, _ = flip
    scene = Scene()
    scene.flip(*flip)
    found = scene.verify(start)
    assert found is None if position < start else place_of(found) == scene.place(layer, position)


@BOTH
@pytest.mark.parametrize("index", [0, 1, 3])
def test_a_stale_block_is_named(layout, index):
    """One block still has the bytes of the request that had it before."""
    scene = Scene(layout)
    stale = Scene(layout)
    stale.canary.write(scene.blocks, 0, make_bases(make_tokens(80, seed=9)))
    block = scene.blocks[index]
    scene.words[:, block] = stale.words[:, block]
    found = scene.verify()
    assert place_of(found) == scene.place(0, index * BLOCK_SIZE)
    assert found.wrong_words == LAYERS * 2 * BLOCK_SIZE


@BOTH
def test_swapped_blocks_are_named(layout):
    """Two blocks that were put into each other's place: the first of them."""
    scene = Scene(layout)
    pair = scene.blocks[[1, 3]]
    scene.words[:, pair] = scene.words[:, pair[::-1]]
    found = scene.verify()
    assert place_of(found) == scene.place(0, BLOCK_SIZE)
    assert found.wrong_words == 2 * LAYERS * 2 * BLOCK_SIZE


@BOTH
@pytest.mark.parametrize("displaced", [1, 8, 9, 24, 40, LENGTH - 1])
def test_a_shifted_tail_is_named(layout, displaced):
    """The last tokens' words lie one slot too far."""
    scene = Scene(layout)
    first = LENGTH - displaced
    scene.canary.write(scene.blocks, first, scene.bases[first - 1 : -1])
    found = scene.verify()
    assert place_of(found) == scene.place(0, first)
    assert found.wrong_words == LAYERS * 2 * displaced


@BOTH
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_missing_layer_is_named(layout, layer):
    """Nothing of it has arrived, and the message says so."""
    scene = Scene(layout)
    scene.words[layer] = 0
    found = scene.verify()
    assert place_of(found) == scene.place(layer, 0)
    assert found.wrong_words == 2 * LENGTH
    assert "nothing was ever written there" in str(found)


@BOTH
def test_layers_in_each_other_s_place_are_named(layout):
    """The bytes of one layer in another one's region."""
    scene = Scene(layout)
    scene.words[[1, 2]] = scene.words[[2, 1]]
    assert place_of(scene.verify()) == scene.place(1, 0)


@BOTH
def test_bytes_of_another_request_are_named(layout):
    """Of the same length, from the first token on."""
    scene = Scene(layout)
    scene.canary.write(scene.blocks, 0, make_bases(make_tokens(LENGTH, seed=9)))
    found = scene.verify()
    assert place_of(found) == scene.place(0, 0)
    assert found.wrong_words == LAYERS * 2 * LENGTH


@BOTH
def test_bytes_with_another_past_are_named(layout):
    """The same tokens at the same places behind another first token: no word of them is right."""
    scene, tokens = Scene(layout), make_tokens(LENGTH, seed=1)
    tokens[0] += 1
    scene.canary.write(scene.blocks, 1, make_bases(tokens)[1:])
    found = scene.verify()
    assert place_of(found) == scene.place(0, 1)
    assert found.wrong_words == LAYERS * 2 * (LENGTH - 1)


@BOTH
def test_a_late_write_of_an_earlier_attempt_is_named(layout):
    """Bytes for a request that is gone, in blocks that it no longer has."""
    scene = Scene(layout)
    gone = make_bases(make_tokens(2 * BLOCK_SIZE, seed=9))
    given_away = scene.blocks[[3, 2]]
    scene.canary.write(given_away, 0, gone)
    found = scene.verify()
    assert place_of(found) == scene.place(0, 2 * BLOCK_SIZE)
    assert found.found == scene.words[0, scene.blocks[2], 0, 0]
    assert found.wrong_words == LAYERS * 2 * len(gone)


@BOTH
def test_another_place_of_the_same_request_is_named(layout):
    """The right bytes, one block too early."""
    scene = Scene(layout)
    scene.words[:, scene.blocks[1]] = scene.words[:, scene.blocks[2]]
    assert place_of(scene.verify()) == scene.place(0, BLOCK_SIZE)


@BOTH
@pytest.mark.parametrize("index", [0, 2, 4])
def test_an_empty_block_is_named(layout, index):
    """Bytes that never arrived, in whole blocks and in the last, partial one."""
    scene = Scene(layout)
    scene.words[:, scene.blocks[index]] = 0
    found = scene.verify()
    assert place_of(found) == scene.place(0, index * BLOCK_SIZE)
    assert found.found == 0
    assert "nothing was ever written there" in str(found)


def test_the_message_has_all_that_is_known():
    """One line for the log."""
    scene = Scene()
    scene.flip(1, 20, 0, 3)
    found = scene.verify()
    assert str(found) == (
        f"layer 1, block {scene.blocks[1]}, slot 4 (position 20): "
        f"expected {found.expected:#010x}, found {found.found:#010x}; 1 words are wrong"
    )


@BOTH
@given(st.data())
@settings(max_examples=20)
def test_long_contexts_are_verified_in_parts(layout, data):
    """More words than are looked at together: five layers go two by two, and are named right all the same."""
    length = 700 * BLOCK_SIZE + 5
    scene = Scene(layout, length, layers=5, blocks=701)
    assert scene.verify() is None
    flips = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, length - 1)), min_size=1, unique=True))
    for layer, position in flips:
        scene.flip(layer, position, 1, 0)
    found = scene.verify()
    assert place_of(found) == scene.place(*min(flips))
    assert found.wrong_words == len(flips)


# What follows from it.


@given(FLIPS, FLIPS)
def test_other_corruptions_are_other_errors(one, other):
    """And none is 0, which would mean that nothing was found."""
    assume(one != other)
    errors = []
    for flip in (one, other):
        scene = Scene()
        scene.flip(*flip)
        errors.append(scene.verify().error)
    assert 0 not in errors
    assert errors[0] != errors[1]


def test_the_same_difference_elsewhere_is_another_error():
    """One and the same bit in each layer, position and head slot: no two have one error."""
    scene, errors = Scene(), set()
    places = [(layer, position, head) for layer in range(LAYERS) for position in range(LENGTH) for head in range(2)]
    for place in places:
        scene.flip(*place, 5)
        errors.add(scene.verify().error)
        scene.flip(*place, 5)
    assert len(errors) == len(places)


@given(st.lists(FLIPS, min_size=1, max_size=6, unique=True))
def test_the_error_does_not_depend_on_the_layout(flips):
    """Nor does anything else that is found."""
    found = []
    for layout in LAYOUTS:
        scene = Scene(layout)
        for flip in flips:
            scene.flip(*flip)
        found.append(astuple(scene.verify()))
    assert found[0] == found[1]


@given(BITS_64, st.integers(1, 2**64 - 1))
def test_an_error_changes_the_next_value(last_sum, error):
    """Whatever it is."""
    assert next_value(last_sum, error) != next_value(last_sum, 0)


@given(BITS_64, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 50_000))
def test_another_token_is_another_base(last_sum, token, other, position):
    """Two different tokens at one place have different words."""
    assume(token != other)
    bases = [bases_of(extend_sums(last_sum, position, np.array([each], dtype=np.uint32)))[0] for each in (token, other)]
    assert bases[0] != bases[1]


# Ranks.


@pytest.mark.parametrize("slots", [1, 2])
def test_words_per_token_are_those_of_this_rank(slots):
    """Layers times head slots."""
    assert Canary(make_words(slots=slots)).words_per_token == LAYERS * slots


@BOTH
def test_two_ranks_write_what_one_does(layout):
    """Each has one of the two head slots."""
    scene = Scene(layout)
    ranks = [make_words(layout, slots=1) for _ in range(2)]
    for rank, words in enumerate(ranks):
        Canary(words, rank).write(scene.blocks, 0, scene.bases)
    assert (np.concatenate(ranks, axis=2) == scene.words).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_sees_its_own_slot_only(rank):
    """What is wrong at one rank is found there and nowhere else."""
    scene = Scene()
    scene.flip(2, 50, rank, 7)
    found = [Canary(scene.words[:, :, slot : slot + 1], slot).verify(scene.blocks, 0, scene.bases) for slot in range(2)]
    assert place_of(found[rank]) == scene.place(2, 50)
    assert found[1 - rank] is None


@pytest.mark.parametrize(("slots", "first"), [(2, 1), (1, 2), (1, -1), (3, 0)])
def test_slots_that_no_model_has_are_refused(slots, first):
    """There are two, over all ranks."""
    with pytest.raises(ValueError, match=f"head slots {first} to {first + slots - 1} are not within 0 to 1"):
        Canary(make_words(slots=slots), first)


# Blocks of sequences that have left.


@BOTH
@pytest.mark.parametrize("index", [0, 2, 4])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_spoiled_page_is_found_if_it_is_not_written_again(layout, index, layer):
    """The same context comes into the same blocks, and one page of it does not come."""
    scene = Scene(layout)
    right = scene.words.copy()
    scene.canary.spoil(scene.blocks)
    for arrived in range(LAYERS):
        blocks = np.delete(scene.blocks, index) if arrived == layer else scene.blocks
        scene.words[arrived, blocks] = right[arrived, blocks]
    found = scene.verify()
    assert place_of(found) == scene.place(layer, index * BLOCK_SIZE)
    assert (found.found, found.wrong_words) == (0, 1)


@BOTH
def test_only_these_blocks_are_spoiled(layout):
    """And written again they are right."""
    scene = Scene(layout)
    right = scene.words.copy()
    scene.canary.spoil(scene.blocks[[1, 4]])
    changed = (scene.words != right).any(axis=(0, 2, 3))
    assert sorted(np.flatnonzero(changed)) == sorted(scene.blocks[[1, 4]])
    scene.canary.write(scene.blocks, 0, scene.bases)
    assert (scene.words == right).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_spoils_its_own_pages(rank):
    """With one head slot each."""
    words = make_words(slots=1)
    canary, blocks, bases = Canary(words, rank), make_blocks(3), make_bases(make_tokens(48))
    canary.write(blocks, 0, bases)
    canary.spoil(blocks)
    assert canary.verify(blocks, 0, bases).wrong_words == LAYERS * 3
