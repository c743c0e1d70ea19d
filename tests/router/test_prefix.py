"""Beginnings of prompts, and who has seen them."""

from kvberth.router.prefix import PrefixMemory, matched_bytes, prefix_digests


def digests(prompt, seed=(b"model",)):
    return prefix_digests(seed, prompt)


def test_a_prompt_has_a_digest_for_each_length_that_it_reaches():
    """Short prompts have none: they are not worth looking for."""
    reached = [len(digests(b"x" * length)) for length in (0, 511, 512, 1023, 1024, 2048, 32767, 32768, 36864)]
    assert reached == [0, 0, 1, 1, 2, 3, 32, 33, 34]
    assert [matched_bytes(count) for count in (0, 1, 2, 33, 34)] == [0, 512, 1024, 32768, 36864]


def test_the_digests_of_a_long_prompt_are_few():
    """A prompt of a million tokens has some dozens, an eighth apart at most."""
    count = len(digests(b"x" * 4_000_000))
    assert count < 80
    assert 4_000_000 * 8 / 9 <= matched_bytes(count) <= 4_000_000


def test_prompts_share_digests_as_far_as_they_agree():
    """The same up to 2,048 bytes and not beyond 3,000."""
    one, other = digests(b"s" * 3000 + b"a" * 7000), digests(b"s" * 3000 + b"b" * 7000)
    assert one[:3] == other[:3]
    assert one[3] != other[3]


def test_what_decides_over_the_cache_beside_the_prompt_counts():
    """Another model's KV is no use; the parts of the seed are kept apart."""
    prompt = b"x" * 600
    assert len({digests(prompt, seed) for seed in [(b"m",), (b"n",), (b"m", b""), (b"", b"m")]}) == 4


def test_the_longest_known_beginning_is_found():
    """A conversation that has grown matches as far as it was seen."""
    memory = PrefixMemory()
    memory.remember(digests(b"x" * 2048))
    assert memory.match(digests(b"x" * 40_000)) == 3
    assert memory.match(digests(b"x" * 1000)) == 1
    assert memory.match(digests(b"y" * 40_000)) == 0
    assert memory.match(()) == 0


def test_the_memory_is_bounded_and_forgets_the_longest_unused():
    """What is seen again stays."""
    memory = PrefixMemory(capacity=2)
    memory.remember([1, 2])
    memory.remember([1])
    memory.remember([3])
    assert len(memory) == 2
    assert [memory.match([each]) for each in (1, 2, 3)] == [1, 0, 1]


def test_of_one_prompt_the_longest_beginnings_are_forgotten_first():
    """What is left of it is still a beginning."""
    memory = PrefixMemory(capacity=2)
    memory.remember([1, 2, 3])
    assert memory.match([1, 2, 3]) == 2


def test_what_was_seen_too_long_ago_does_not_count():
    """The engine has been sent 1,000 tokens since: a cache of 900 has forgotten, one of 1,000 has not."""
    memory = PrefixMemory()
    memory.remember([1], 100)
    memory.remember([2], 900)
    assert (memory.match([1], 900), memory.match([1], 1000)) == (0, 1)
    memory.remember([1, 3])
    assert memory.match([1, 3], 900) == 2


def test_what_the_engine_cannot_have_any_more_is_forgotten():
    """However few they are; what is seen again stays."""
    memory = PrefixMemory()
    memory.remember([1], 100, within_tokens=1000)
    memory.remember([2], 900, within_tokens=1000)
    memory.remember([3], 100, within_tokens=1000)
    assert len(memory) == 2
    memory.remember([2, 4], 900, within_tokens=1000)
    assert [memory.match([each]) for each in (1, 2, 3, 4)] == [0, 1, 1, 1]
    memory.remember([5], 2000, within_tokens=1000)
    assert len(memory) == 0
