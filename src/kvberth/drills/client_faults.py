"""Faults that clients bring: they leave, stall, send rubbish, or want more than there is. As `faults` otherwise."""

import contextlib
import random
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from kvberth.drills.cluster import MODEL, PREFILL, DrillCluster

__all__ = ["FillMemory", "Garbage", "GarbageOnControl", "Leave", "Stall"]

_FILL_SECONDS = 20.0
_LOOK_SECONDS = 0.3
_FULL = 0.9
"""Of the KV blocks. What is left has no room for two of the longer prompts."""


@dataclass(slots=True)
class Leave:
    """For traffic whose clients go away: whether the router has heard of it."""

    trace: ClassVar[str] = "requests cancelled"
    felt: int = 0

    def begin(self, cluster: DrillCluster) -> None:
        self.felt = -self._count(cluster)

    def end(self, cluster: DrillCluster) -> None:
        self.felt += self._count(cluster)

    @staticmethod
    def _count(cluster: DrillCluster) -> int:
        return int(cluster.router_metric("kvberth_router_client_disconnects_total"))


@dataclass(slots=True)
class FillMemory:
    """Long requests of somebody else that take nearly all KV blocks of these engines, sent around the router.

    It has begun when the engines are full.
    """

    names: tuple[str, ...]
    prompt_tokens: int = 15_000
    requests: int = 4
    output_tokens: int = 1_000
    trace: ClassVar[str] = "requests that waited or were preempted"
    felt: int = 0
    _threads: list[threading.Thread] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def begin(self, cluster: DrillCluster) -> None:
        before = {name: cluster.pressure(name).preemptions for name in self.names}
        full = {name: threading.Event() for name in self.names}
        for name in self.names:
            url = cluster.engine_url(name)
            self._spawn(self._watch, cluster, name, before[name], full[name])
            for seed in range(self.requests):
                self._spawn(self._run, url, seed)
        for each in full.values():
            each.wait(_FILL_SECONDS)

    def end(self, cluster: DrillCluster) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _spawn(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, name="kvb-fill"))
        self._threads[-1].start()

    def _watch(self, cluster: DrillCluster, name: str, preemptions: float, is_full: threading.Event) -> None:
        """Count who suffers while the memory is full; with much of it free, requests wait for their turn only."""
        while not self._is_over.wait(_LOOK_SECONDS):
            with contextlib.suppress(OSError):
                now = cluster.pressure(name)
                if now.usage >= _FULL:
                    is_full.set()
                    self.felt = max(self.felt, int(now.waiting + now.preemptions - preemptions))

    def _run(self, url: str, seed: int) -> None:
        """Stream it, and leave when the drill is over, as clients do."""
        chance = random.Random(seed)  # noqa: S311 - not a secret
        body = {
            "model": MODEL,
            "prompt": [chance.randrange(1000, 20000) for _ in range(self.prompt_tokens)],
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        while not self._is_over.is_set():
            request = urllib.request.Request(  # noqa: S310 - our own URL
                f"{url}/v1/completions", msgspec.json.encode(body), {"content-type": "application/json"}
            )
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
                while not self._is_over.is_set() and answer.readline():
                    pass


_POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
_JSON = b"content-type: application/json\r\n"
_JUNK = (
    b"",
    b"\x00" * 64,
    b"GET / HTTP/1.1\r\n\r\n",
    _POST + _JSON + b'content-length: 9\r\n\r\n{"model":',
    _POST + b"content-length: 1000000\r\n\r\n{",
    _POST + b"content-length: -1\r\n\r\n",
    _POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    _POST + b"content-length: 4\r\n\r\nnull",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n[]",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
    b"X" * 100_000,
)


@dataclass(slots=True)
class Garbage:
    """Connections to the router that send what is no request, or half of one, and go away."""

    chance: random.Random
    count: int = 200
    trace: ClassVar[str] = "connections"
    felt: int = 0

    def begin(self, cluster: DrillCluster) -> None:
        self.felt = _throw(cluster.router_address, _JUNK, self.count, self.chance)

    def end(self, cluster: DrillCluster) -> None:
        pass


_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
_READY = b"\x04\x1b\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
_CONTROL_JUNK = (
    b"\x00" * 100,
    _GREETING,
    _GREETING + b"\x02" + b"\xff" * 8,
    _GREETING + _READY + b"\x00\x05hello",
    _GREETING + _READY + b"\x00\x03\x00\x01\x80",
    _GREETING + _READY + b"\x00\x00",
    b"GET / HTTP/1.1\r\n\r\n",
)
"""ZeroMQ's greeting and first command are right in some: what follows them reaches the mover."""


@dataclass(slots=True)
class GarbageOnControl:
    """The same to the prefill workers' control channels."""

    chance: random.Random
    count: int = 200
    trace: ClassVar[str] = "connections"
    felt: int = 0

    def begin(self, cluster: DrillCluster) -> None:
        for name in PREFILL:
            self.felt += _throw(cluster.control_address(name), _CONTROL_JUNK, self.count // len(PREFILL), self.chance)

    def end(self, cluster: DrillCluster) -> None:
        pass


def _throw(address: tuple[str, int], junk: Sequence[bytes], count: int, chance: random.Random) -> int:
    """Many connections, up to 20 open at a time, each with a piece of junk and some with noise behind it.

    Returns how many were taken.
    """
    held: list[socket.socket] = []
    taken = 0
    for _ in range(count):
        noise = chance.randbytes(chance.randrange(200)) if chance.random() < 0.3 else b""
        with contextlib.suppress(OSError):
            held.append(socket.create_connection(address, timeout=2))
            held[-1].sendall(chance.choice(junk) + noise)
            taken += 1
        if len(held) > 20:
            held.pop(chance.randrange(len(held))).close()
        time.sleep(0.005)
    for each in held:
        each.close()
    return taken


@dataclass(slots=True)
class Stall:
    """Clients that ask for long answers and read none of them."""

    count: int = 8
    trace: ClassVar[str] = "clients that stalled"
    felt: int = 0
    _held: list[socket.socket] = field(default_factory=list)

    def begin(self, cluster: DrillCluster) -> None:
        for seed in range(self.count):
            prompt = [1000 + (seed * 31 + index) % 19_000 for index in range(2000)]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "stream": True}
            encoded = msgspec.json.encode(body)
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(5)
            client.connect(cluster.router_address)
            client.sendall(_POST + _JSON + f"content-length: {len(encoded)}\r\n\r\n".encode() + encoded)
            self._held.append(client)

    def end(self, cluster: DrillCluster) -> None:
        self.felt = self.count_stalled()
        for client in self._held:
            client.close()

    def count_stalled(self) -> int:
        """Clients who have a part of their answer before them, and to whom no more is sent until they read it."""
        before = [_unread(client) for client in self._held]
        time.sleep(_STILL_SECONDS)
        return sum(b"data:" in one and one == two for one, two in zip(before, map(_unread, self._held), strict=True))


_STILL_SECONDS = 0.5
"""A token takes some milliseconds."""


def _unread(client: socket.socket) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return client.recv(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return b""
