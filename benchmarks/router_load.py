"""The client of the router's benchmark: so many streams at once, each checked to the byte.

Beside routers it can ask the engines themselves, with the same legs in the same order: what a router adds is what it
takes longer than that.
"""

import asyncio
import gc
import itertools
import os
import random
import resource
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any

import httptools
import msgspec
import uvloop
from benchmarks.router_clock import Clock
from benchmarks.router_engines import DONE, text_of

__all__ = ["Load", "Mode", "Record", "StreamCheck", "Target", "serve_client"]

_PATH = "/v1/completions"
_CONNECT_PAUSE_SECONDS = 0.002
_PATIENCE_SECONDS = 60.0


class Mode(StrEnum):
    """Both legs at once, or D's behind P's."""

    PUSH = "push"
    PULL = "pull"


@dataclass(frozen=True)
class Target:
    """Who is asked: a router's port, or those of both engines."""

    name: str
    mode: Mode
    ports: tuple[int, ...]

    @property
    def is_direct(self) -> bool:
        return len(self.ports) > 1


@dataclass(frozen=True)
class Load:
    """One window.

    Attributes:
        streams: how many at once, each request followed by the next one at once.
        tokens: per request; lengths differ by a quarter, so that streams do not fall into step.
        prompt_bytes: of text, the beginnings all different.
        seconds: for which requests are begun; those of the first `ramp_seconds` are not counted.
        is_single: each stream is one request only, begun in the ramp.
    """

    target: Target
    streams: int
    tokens: int
    prompt_bytes: int
    seconds: float
    ramp_seconds: float
    seed: int
    is_single: bool = False


@dataclass
class Record:
    """One request. Times in milliseconds.

    Attributes:
        sent_s: from the window's begin.
        arrivals_ms: of each token, from the sending.
        delays_ms: of each token, from the engine's write.
        error: what was wrong; None for a stream that came whole and unchanged.
    """

    sent_s: float
    tokens: int
    is_counted: bool
    arrivals_ms: list[float] = field(default_factory=list)
    delays_ms: list[float] = field(default_factory=list)
    error: str | None = None


class StreamCheck:
    """Reads one answer: takes the times, and checks that each token came, in order, and every byte unchanged."""

    def __init__(self, record: Record, sent: float) -> None:
        self._record = record
        self._sent = sent
        self._pending = b""
        self._checksum = 0
        self._has_said_checksum = False
        self._is_done = False

    def feed(self, data: bytes, now: float) -> None:
        """Raises `ValueError` at the first thing that is wrong."""
        self._pending += data
        while (end := self._pending.find(b"\n\n") + 2) > 1:
            one, self._pending = self._pending[:end], self._pending[end:]
            self._take(one, now)

    def finish(self) -> None:
        """The answer has ended. Raises `ValueError` if it is not whole."""
        if not self._is_done or self._pending:
            raise ValueError(f"the stream ended after {len(self._record.arrivals_ms)} tokens, without its end")
        if len(self._record.arrivals_ms) != self._record.tokens:
            raise ValueError(f"{len(self._record.arrivals_ms)} tokens of {self._record.tokens}")

    def _take(self, one: bytes, now: float) -> None:
        if self._has_said_checksum:
            if one != DONE:
                raise ValueError(f"{one[:80]!r} in place of the end")
            self._is_done = True
            return
        first, second = text_of(one).split(b" ")
        if first == b"crc":
            if int(second) != self._checksum:
                raise ValueError("the bytes are not those that the engine sent")
            self._has_said_checksum = True
            return
        if int(first) != len(self._record.arrivals_ms):
            raise ValueError(f"token {int(first)} came as number {len(self._record.arrivals_ms)}")
        self._checksum = zlib.crc32(one, self._checksum)
        self._record.arrivals_ms.append(round(1e3 * (now - self._sent), 3))
        self._record.delays_ms.append(round(1e3 * now - int(second) / 1e6, 3))


class _Connection(asyncio.Protocol):
    """One HTTP connection, for one request after the other."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._on_body: Callable[[bytes], None] | None = None
        self._done: asyncio.Future[int] | None = None
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: Any) -> None:  # uvloop's are no asyncio.Transport
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error or ConnectionResetError("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error.__context__ or error)
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None:
            self._on_body(body)

    def on_message_complete(self) -> None:
        done, self._done = self._done, None
        if done is not None and not done.done():
            done.set_result(self._parser.get_status_code())

    def post(self, head: bytes, body: bytes, on_body: Callable[[bytes], None]) -> "asyncio.Future[int]":
        """Gives the status when the answer has ended."""
        self._on_body = on_body
        self._done = done = asyncio.get_running_loop().create_future()
        self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        return done

    def _fail(self, error: BaseException) -> None:
        done, self._done = self._done, None
        if done is not None and not done.done():
            done.set_exception(error)


class _Stream:
    """One of the streams: its connections, and one request at a time."""

    def __init__(self, load: Load, connections: list[_Connection], source: random.Random) -> None:
        self._load = load
        self._connections = connections
        self._source = source
        extra = f"x-kvberth-mode: {load.target.mode}\r\n" if not load.target.is_direct else ""
        self._head = (
            f"POST {_PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"user-agent: benchmark\r\naccept: */*\r\n{extra}"
        ).encode()

    async def request(self, began: float, *, is_counted: bool) -> Record:
        quarter = self._load.tokens // 4
        tokens = self._source.randint(self._load.tokens - quarter, self._load.tokens + quarter)
        body = self._body(tokens)
        sent = time.monotonic()
        record = Record(round(sent - began, 4), tokens, is_counted)
        check = StreamCheck(record, sent)

        def take(data: bytes) -> None:
            check.feed(data, time.monotonic())

        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                status = await self._ask(body, take)
            if status != 200:
                raise ValueError(f"the status is {status}")  # noqa: TRY301
            check.finish()
        except (ValueError, OSError, httptools.HttpParserError) as error:
            record.error = f"{type(error).__name__}: {error}"
        return record

    def _body(self, tokens: int) -> bytes:
        beginning = f"{self._source.getrandbits(128):032x} "
        prompt = (beginning + "word " * (self._load.prompt_bytes // 5))[: self._load.prompt_bytes]
        return b'{"model":"model","prompt":"%b","max_tokens":%d,"temperature":0.0,"stream":true,"ignore_eos":true}' % (
            prompt.encode(),
            tokens,
        )

    async def _ask(self, body: bytes, take: Callable[[bytes], None]) -> int:
        if not self._load.target.is_direct:
            return await self._connections[0].post(self._head, body, take)
        to_prefill, to_decode = self._connections
        transfer_id = f"{self._source.getrandbits(128):032x}"
        if self._load.target.mode is Mode.PUSH:
            answered = to_prefill.post(self._head, _prefill_body(body, transfer_id), _ignore)
            status = await to_decode.post(self._head, _decode_body(body, transfer_id), take)
            return status if await answered == 200 else 0
        answer = bytearray()
        await to_prefill.post(self._head, _prefill_body(body, transfer_id), answer.extend)
        params = msgspec.json.decode(answer)["kv_transfer_params"]
        return await to_decode.post(self._head, _with_params(body, msgspec.json.encode(params)), take)


def _ignore(_data: bytes) -> None:
    pass


def _prefill_body(body: bytes, transfer_id: str) -> bytes:
    params = b'{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"%b"}' % transfer_id.encode()
    alone = body.replace(b'"stream":true', b'"stream":false')
    return _with_params(alone, params)


def _decode_body(body: bytes, transfer_id: str) -> bytes:
    return _with_params(body, b'{"do_remote_prefill":true,"transfer_id":"%b"}' % transfer_id.encode())


def _with_params(body: bytes, params: bytes) -> bytes:
    return b'{"kv_transfer_params":%b,%b' % (params, body[1:])


async def _run(load: Load) -> list[Record]:
    loop = asyncio.get_running_loop()
    clock = Clock(loop)
    connections: list[list[_Connection]] = []
    for _ in range(load.streams):
        row = [(await loop.create_connection(_Connection, "127.0.0.1", port))[1] for port in load.target.ports]
        connections.append(row)
    source = random.Random(load.seed)  # noqa: S311 - no secret
    records: list[Record] = []
    began = time.monotonic() + _CONNECT_PAUSE_SECONDS

    async def go_on(number: int, row: list[_Connection]) -> None:
        stream = _Stream(load, row, random.Random(source.getrandbits(64)))  # noqa: S311 - no secret
        await clock.sleep_until(began + load.ramp_seconds * number / load.streams)
        for count in itertools.count():
            elapsed = time.monotonic() - began
            if (load.is_single and count) or elapsed > load.seconds:
                break
            record = await stream.request(began, is_counted=load.is_single or elapsed >= load.ramp_seconds)
            records.append(record)
            if record.error is not None:
                break

    await asyncio.gather(*(go_on(number, row) for number, row in enumerate(connections)))
    for row in connections:
        for each in row:
            each.transport.close()
    return records


def serve_client(pipe: Connection, cpus: set[int]) -> None:
    """The client's process: a `Load` in, its `Record`s and its own CPU seconds out, until None comes."""
    os.sched_setaffinity(0, cpus)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    pipe.send("ready")
    while (load := pipe.recv()) is not None:
        gc.collect()
        gc.disable()  # its pauses are not the router's
        cpu = time.process_time()
        records = uvloop.run(_run(load))
        pipe.send((records, time.process_time() - cpu))
        gc.enable()
