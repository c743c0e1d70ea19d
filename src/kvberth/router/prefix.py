"""Which engine has seen the beginning of a prompt before, and so may still have its KV cache. No I/O.

The router does not tokenize. It takes digests of the request's bytes at a few lengths, so that both a system prompt
that many share and one conversation that grows are recognised; the longest that an engine knows counts.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

__all__ = ["PrefixMemory", "prefix_digests"]

# At about 4 bytes a token these are 128 to 8,192 tokens: 8 to 512 of vLLM's usual blocks. Shorter prompts are computed
# sooner than looked for.
_LENGTHS_BYTES = (512, 2048, 8192, 32768)
_DIGEST_BYTES = 16
_REMEMBERED_DIGESTS = 8192


def prefix_digests(seed: Iterable[bytes], prompt: bytes) -> tuple[bytes, ...]:
    """Digests of the prompt's beginnings, shortest first; none where it is shorter than the shortest.

    `seed` is what else decides over the KV cache, such as the model's name.
    """
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in seed:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    digests = []
    start = 0
    for end in _LENGTHS_BYTES:
        if len(prompt) < end:
            break
        digest.update(prompt[start:end])
        digests.append(digest.digest())
        start = end
    return tuple(digests)


class PrefixMemory:
    """The beginnings that one engine saw lately; the longest unused are forgotten first."""

    def __init__(self, capacity: int = _REMEMBERED_DIGESTS) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def remember(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def match(self, digests: Sequence[bytes]) -> int:
        """How many of the digests, from the shortest beginning on, are known; 0 is none."""
        return next((count for count in range(len(digests), 0, -1) if digests[count - 1] in self._seen), 0)
