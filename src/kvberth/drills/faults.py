"""What a drill does to the cluster: each fault begins, and ends. Methods block for as long as the deed itself takes."""

import contextlib
import random
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvberth.drills.cluster import MODEL, PREFILL, DrillCluster
from kvberth.drills.wire import Rule
from kvberth.drills.zmtp import Meddling

__all__ = [
    "DiskFull",
    "Fault",
    "FillMemory",
    "Flap",
    "Garbage",
    "GarbageOnControl",
    "Kill",
    "Meddle",
    "Nothing",
    "Pause",
    "Rules",
    "Stall",
    "Terminate",
    "TransferErrors",
]


class Fault(Protocol):
    """Something that goes wrong for a while."""

    def begin(self, cluster: DrillCluster) -> None: ...
    def end(self, cluster: DrillCluster) -> None:
        """Undo it; what was ended is started again, and may not be ready yet."""


class Nothing:
    """For drills whose traffic is the fault."""

    def begin(self, cluster: DrillCluster) -> None:
        pass

    def end(self, cluster: DrillCluster) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL; then a new start at the same address."""

    names: tuple[str, ...]

    def begin(self, cluster: DrillCluster) -> None:
        # All at once: to see one of them gone takes a while.
        for name in self.names:
            cluster.signal(name, signal.SIGKILL)
        for name in self.names:
            cluster.await_end(name)

    def end(self, cluster: DrillCluster) -> None:
        for name in self.names:
            cluster.start(name)


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM, as from a supervisor that moves the worker elsewhere; then a new start at the same address."""

    names: tuple[str, ...]

    def begin(self, cluster: DrillCluster) -> None:
        for name in self.names:
            cluster.terminate(name)

    def end(self, cluster: DrillCluster) -> None:
        for name in self.names:
            cluster.await_end(name)
            cluster.start(name)


@dataclass(frozen=True, slots=True)
class Pause:
    """SIGSTOP, then SIGCONT: a process that hangs and wakes up, and does not know that it has."""

    names: tuple[str, ...]

    def begin(self, cluster: DrillCluster) -> None:
        for name in self.names:
            cluster.signal(name, signal.SIGSTOP)

    def end(self, cluster: DrillCluster) -> None:
        for name in self.names:
            cluster.signal(name, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class Rules:
    """The network at fault."""

    rules: tuple[Rule, ...]

    def begin(self, cluster: DrillCluster) -> None:
        cluster.set_rules(*self.rules)

    def end(self, cluster: DrillCluster) -> None:
        cluster.set_rules()


@dataclass(slots=True)
class Flap:
    """The network at fault again and again: `on_seconds` with it, `off_seconds` without."""

    rules: tuple[Rule, ...]
    on_seconds: float
    off_seconds: float
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def begin(self, cluster: DrillCluster) -> None:
        self._thread = threading.Thread(target=self._run, args=(cluster,), name="kvb-flap")
        self._thread.start()

    def end(self, cluster: DrillCluster) -> None:
        self._is_over.set()
        assert self._thread is not None
        self._thread.join()
        cluster.set_rules()

    def _run(self, cluster: DrillCluster) -> None:
        while not self._is_over.is_set():
            cluster.set_rules(*self.rules)
            self._is_over.wait(self.on_seconds)
            cluster.set_rules()
            self._is_over.wait(self.off_seconds)


@dataclass(frozen=True, slots=True)
class Meddle:
    """Control messages at fault, of all prefill workers."""

    meddling: Meddling

    def begin(self, cluster: DrillCluster) -> None:
        cluster.meddle(self.meddling)

    def end(self, cluster: DrillCluster) -> None:
        cluster.meddle(Meddling())


@dataclass(frozen=True, slots=True)
class TransferErrors:
    """NIXL at fault, in engines of these names; shares as in `kvberth.emulator.faults`."""

    names: tuple[str, ...]
    post: float = 0.0
    transfer: float = 0.0

    def begin(self, cluster: DrillCluster) -> None:
        for name in self.names:
            cluster.fail_transfers(name, post=self.post, transfer=self.transfer)

    def end(self, cluster: DrillCluster) -> None:
        for name in self.names:
            cluster.fail_transfers(name, post=0.0, transfer=0.0)


@dataclass(slots=True)
class FillMemory:
    """Long requests of somebody else that take nearly all KV blocks of these engines, sent around the router."""

    names: tuple[str, ...]
    prompt_tokens: int = 15_000
    requests: int = 4
    output_tokens: int = 1_000
    _threads: list[threading.Thread] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def begin(self, cluster: DrillCluster) -> None:
        self._threads = [
            threading.Thread(target=self._run, args=(cluster.engine_url(name), seed), name="kvb-fill")
            for name in self.names
            for seed in range(self.requests)
        ]
        for thread in self._threads:
            thread.start()

    def end(self, cluster: DrillCluster) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

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


class DiskFull:
    """No process of the cluster can write another byte to any file, its log among them."""

    def begin(self, cluster: DrillCluster) -> None:
        cluster.limit_files(0)

    def end(self, cluster: DrillCluster) -> None:
        cluster.limit_files(None)


_POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
_JUNK = (
    b"",
    b"\x00" * 64,
    b"GET / HTTP/1.1\r\n\r\n",
    _POST + b'content-type: application/json\r\ncontent-length: 9\r\n\r\n{"model":',
    _POST + b"content-length: 1000000\r\n\r\n{",
    _POST + b"content-length: -1\r\n\r\n",
    _POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    _POST + b"content-length: 4\r\n\r\nnull",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n[]",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
    b"X" * 100_000,
)


@dataclass(frozen=True, slots=True)
class Garbage:
    """Connections to the router that send what is no request, or half of one, and go away."""

    chance: random.Random
    count: int = 200

    def begin(self, cluster: DrillCluster) -> None:
        _throw(cluster.router_address, _JUNK, self.count, self.chance)

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


@dataclass(frozen=True, slots=True)
class GarbageOnControl:
    """The same to the prefill workers' control channels."""

    chance: random.Random
    count: int = 200

    def begin(self, cluster: DrillCluster) -> None:
        for name in PREFILL:
            _throw(cluster.control_address(name), _CONTROL_JUNK, self.count // len(PREFILL), self.chance)

    def end(self, cluster: DrillCluster) -> None:
        pass


def _throw(address: tuple[str, int], junk: Sequence[bytes], count: int, chance: random.Random) -> None:
    """Many connections, up to 20 open at a time, each with a piece of junk and some with noise behind it."""
    held: list[socket.socket] = []
    for _ in range(count):
        noise = chance.randbytes(chance.randrange(200)) if chance.random() < 0.3 else b""
        with contextlib.suppress(OSError):
            held.append(socket.create_connection(address, timeout=2))
            held[-1].sendall(chance.choice(junk) + noise)
        if len(held) > 20:
            held.pop(chance.randrange(len(held))).close()
        time.sleep(0.005)
    for each in held:
        each.close()


@dataclass(slots=True)
class Stall:
    """Clients that ask for long answers and read none of them."""

    count: int = 8
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
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(encoded)}\r\n\r\n"
            client.sendall(head.encode() + encoded)
            self._held.append(client)

    def end(self, cluster: DrillCluster) -> None:
        for client in self._held:
            client.close()
