"""Which engine has seen the beginning of a prompt before, and so may still have its KV cache. No I/O.

The router does not tokenize. It takes digests of the request's bytes at several lengths, so that both a system prompt
that many share and one conversation that grows are recognised; the longest that an engine knows counts.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence

__all__ = ["PrefixMemory", "matched_bytes", "prefix_digests"]


def _lengths() -> tuple[int, ...]:
    """512 bytes, every KiB up to 32, and from there on an eighth more each, to 4 MiB.

    At about 4 bytes a token the first is 128 tokens, or 8 of vLLM's usual blocks. Shorter prompts are computed sooner
    than looked for.
    """
    lengths = [512, *range(1024, 32 * 1024 + 1, 1024)]
    while lengths[-1] < 4 * 1024 * 1024:
        lengths.append(lengths[-1] * 9 // 8)
    return tuple(lengths)


_LENGTHS_BYTES = _lengths()
_REMEMBERED_DIGESTS = 65536


def prefix_digests(seed: Iterable[bytes], prompt: bytes) -> tuple[int, ...]:
    """Digests of the prompt's beginnings, shortest first; none where it is shorter than the shortest.

    `seed` is what else decides over the KV cache, such as the model's name. Digests are Python's own hashes, of 64 bits
    and with a key that is this process's: a quarter of a cryptographic digest's time, and nobody else ever sees one.
    """
    digest = hash(tuple(seed))
    digests = []
    start = 0
    for end in _LENGTHS_BYTES[: bisect_right(_LENGTHS_BYTES, len(prompt))]:
        digest = hash((digest, prompt[start:end]))
        digests.append(digest)
        start = end
    return tuple(digests)


def matched_bytes(count: int) -> int:
    """How much of a prompt its first `count` digests cover."""
    return _LENGTHS_BYTES[count - 1] if count else 0


class PrefixMemory:
    """The beginnings that one engine saw lately; the longest unused are forgotten first.

    Each is remembered with the number of prompt tokens that the engine had been sent before: an engine's cache forgets
    in the same order, as what comes later needs the room.
    """

    def __init__(self, capacity: int = _REMEMBERED_DIGESTS) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._sent_tokens = 0

    def __len__(self) -> int:
        return len(self._seen)

    def remember(self, digests: Sequence[int], prompt_tokens: int = 0, within_tokens: float = float("inf")) -> None:
        """The engine is sent a prompt of so many tokens, with these beginnings.

        What was seen before the last `within_tokens` tokens is forgotten: the engine has it no more.
        """
        for digest in reversed(digests):  # a beginning is not forgotten before what it is the beginning of
            if digest in self._seen:
                self._seen.move_to_end(digest)
            self._seen[digest] = self._sent_tokens
        self._sent_tokens += prompt_tokens
        oldest = self._sent_tokens - within_tokens
        while self._seen and (len(self._seen) > self._capacity or next(iter(self._seen.values())) < oldest):
            self._seen.popitem(last=False)

    def match(self, digests: Sequence[int], within_tokens: float = float("inf")) -> int:
        """How many of the digests, from the shortest beginning on, are known; 0 is none.

        Those that were seen before the last `within_tokens` tokens do not count.
        """
        oldest = self._sent_tokens - within_tokens
        for count, digest in enumerate(digests):
            seen = self._seen.get(digest)
            if seen is None or seen < oldest:
                return count
        return len(digests)
