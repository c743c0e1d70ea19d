"""The network between the processes of a drilled cluster, as rules: which packet arrives, and when. No I/O, no clock.

Packets are IPv4, from one address to another. All that TCP does about losses and delays happens in the kernels at both
ends, as over any network; this only decides what becomes of each packet.
"""

import heapq
import itertools
import random
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address

import msgspec

__all__ = ["ROOM_SECONDS", "Rule", "Wire", "paths"]

ROOM_SECONDS = 0.5
"""What a narrow path holds back at most; a packet that would wait longer is dropped, as by a switch's full queue."""

_SOURCE, _TARGET = slice(12, 16), slice(16, 20)
_HEADER_BYTES = 20


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to packets from one address to another, in this direction only.

    Attributes:
        loss: share of the packets that never arrive, from 0 to 1; at 1 the path is cut.
        delay_seconds: by which each one is late.
        bytes_per_second: of the path; None is no limit.
    """

    source: str
    target: str
    loss: float = 0.0
    delay_seconds: float = 0.0
    bytes_per_second: float | None = None


def paths(
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    both_ways: bool = False,
    loss: float = 0.0,
    delay_seconds: float = 0.0,
    bytes_per_second: float | None = None,
) -> tuple[Rule, ...]:
    """One rule for each path from one of the sources to one of the targets, and for those back if `both_ways`."""
    pairs = {(source, target) for source in sources for target in targets if source != target}
    if both_ways:
        pairs |= {(target, source) for source, target in pairs}
    return tuple(
        Rule(source=source, target=target, loss=loss, delay_seconds=delay_seconds, bytes_per_second=bytes_per_second)
        for source, target in sorted(pairs)
    )


class Wire:
    """Takes packets, and gives them back when they have arrived. `hits` counts those that a rule has hit.

    Args:
        seed: of the losses.
    """

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)  # noqa: S311 - not a secret
        self._rules: dict[bytes, Rule] = {}
        self._free_at: dict[bytes, float] = {}
        self._under_way: list[tuple[float, int, bytes]] = []
        self._numbers = itertools.count()
        self.hits = {"dropped": 0, "delayed": 0}

    def set_rules(self, rules: Iterable[Rule]) -> None:
        """Replace all rules; without one a path is perfect. What is under way arrives as it would have."""
        self._rules = {IPv4Address(each.source).packed + IPv4Address(each.target).packed: each for each in rules}
        self._free_at.clear()

    def send(self, packet: bytes, now: float) -> None:
        """Take a packet that was sent at `now`."""
        if len(packet) < _HEADER_BYTES or packet[0] >> 4 != 4:
            return  # the kernel's own IPv6 chatter
        path = packet[_SOURCE] + packet[_TARGET]
        rule = self._rules.get(path)
        arrival = now
        if rule is not None:
            if rule.loss and self._chance.random() < rule.loss:
                self.hits["dropped"] += 1
                return
            if rule.bytes_per_second is not None:
                begins = max(now, self._free_at.get(path, now))
                if begins - now > ROOM_SECONDS:
                    self.hits["dropped"] += 1
                    return
                arrival = self._free_at[path] = begins + len(packet) / rule.bytes_per_second
            arrival += rule.delay_seconds
            self.hits["delayed"] += arrival > now
        heapq.heappush(self._under_way, (arrival, next(self._numbers), packet))

    def arrived(self, now: float) -> list[tuple[bytes, bytes]]:
        """Pairs (target address, packet) of all that have arrived by `now`, in the order of their arrival."""
        packets = []
        while self._under_way and self._under_way[0][0] <= now:
            packet = heapq.heappop(self._under_way)[2]
            packets.append((packet[_TARGET], packet))
        return packets

    def next_arrival(self) -> float | None:
        """When the next packet arrives; None if none is under way."""
        return self._under_way[0][0] if self._under_way else None
