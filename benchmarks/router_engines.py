"""Engines for the router's benchmark: HTTP as vLLM speaks it, a clock in place of a model.

A prefill and a decode worker in one process. P answers a fixed time after it was asked. D sends the head of its stream
at once, as vLLM does, and its first token one step after it was asked or after P's end, whichever is later: in a push
its blocks come only then. Each token is one event and one write. A real API server writes slower than this one.

Every event says in its text which token it is and when it was written; the last one has the checksum of all before it.
"""

import asyncio
import gc
import itertools
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import httptools
import msgspec
import uvloop
from benchmarks.router_clock import Clock
from benchmarks.router_control import Control

__all__ = ["DONE", "Pace", "event", "serve_engines", "text_of"]

DONE = b"data: [DONE]\n\n"
_EVENT = (
    b'data: {"id":"cmpl-5d1f8c2e9a7b4f63","object":"text_completion","created":1764460800,"model":"model",'
    b'"choices":[{"index":0,"text":"%s","logprobs":null,"finish_reason":%s,"stop_reason":null,"token_ids":%s,'
    b'"prompt_logprobs":null,"prompt_token_ids":%s}],"usage":null}\n\n'
)
_TEXT_BEGINS = b'"text":"'
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"x-request-id: %s\r\ntransfer-encoding: chunked\r\n\r\n"
)
_METRICS = (
    'kvberth:engine_info{{role="{role}",engine_id="{role}",control_host="127.0.0.1",control_port="{port}",tp_size="1",'
    'transfer_mode="push",protocol_version="1",model_name="model",engine="0"}} 1\n'
    'vllm:num_requests_running{{engine="0"}} {running}\n'
    'vllm:num_requests_waiting{{engine="0"}} 0\n'
    'vllm:kv_cache_usage_perc{{engine="0"}} 0.1\n'
    'vllm:cache_config_info{{engine="0",block_size="16",num_gpu_blocks="100000"}} 1\n'
)
_PROMPT_IDS = b"[%b]" % b",".join(b"%d" % (10_000 + number) for number in range(4096))
_MODELS = b'{"object":"list","data":[{"id":"model","object":"model","max_model_len":131072}]}'


@dataclass(frozen=True)
class Pace:
    """How fast the engines are.

    Attributes:
        in_steps: all streams get their tokens at once, as from one batch; otherwise each has a clock of its own.
    """

    prefill_seconds: float
    token_seconds: float
    in_steps: bool = False


class _Asked(msgspec.Struct):
    """What is read of a request's body."""

    max_tokens: int
    stream: bool = False
    return_token_ids: bool = False
    kv_transfer_params: dict[str, Any] | None = None


_asked_decoder = msgspec.json.Decoder(_Asked)


def event(text: bytes, *, is_last: bool = False, ids: bytes = b"null", prompt_ids: bytes = b"null") -> bytes:
    """One server-sent event of a completion."""
    return _EVENT % (text, b'"length"' if is_last else b"null", ids, prompt_ids)


def text_of(an_event: bytes) -> bytes:
    """What `event` was given. Raises `ValueError` for anything else."""
    begin = an_event.index(_TEXT_BEGINS) + len(_TEXT_BEGINS)
    return an_event[begin : an_event.index(b'"', begin)]


class _Site:
    """What both workers share: the pace, and the ends of prefills that D waits for."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.running = {"kv_producer": 0, "kv_consumer": 0}
        self.clock = Clock(asyncio.get_running_loop())
        self._numbers = itertools.count()
        self._ends: dict[str, float] = {}
        self._waiting: dict[str, Callable[[float], None]] = {}
        self.control = Control()
        self._batch: dict[_Stream, None] = {}

    def prefill(self, transfer_id: str | None) -> tuple[str, float]:
        """A prompt is computed from now on; gives the transfer's id and the end."""
        key = transfer_id or str(next(self._numbers))
        end = time.monotonic() + self.pace.prefill_seconds
        self.control.begun(key)
        self.clock.call_at(end, self.control.computed, key)
        if waiting := self._waiting.pop(key, None):
            waiting(end)
        else:
            self._ends[key] = end
        return key, end

    def when_prefilled(self, transfer_id: str, tell: Callable[[float], None]) -> None:
        """`tell` is called with the end of the prefill as soon as that is known."""
        self.control.registered(transfer_id)
        if (end := self._ends.pop(transfer_id, None)) is not None:
            tell(end)
        else:
            self._waiting[transfer_id] = tell

    def join_batch(self, stream: "_Stream") -> None:
        """From the next step on it gets its tokens with all others."""
        self._batch[stream] = None
        if len(self._batch) == 1:
            self.clock.call_at(time.monotonic() + self.pace.token_seconds, self._step)

    def _step(self) -> None:
        began = time.monotonic()
        for stream in list(self._batch):
            if not stream.write_token():
                del self._batch[stream]
        if self._batch:
            self.clock.call_at(began + self.pace.token_seconds, self._step)


class _Stream:
    """D's answer to one request."""

    def __init__(self, connection: "_Server", num_tokens: int, *, with_ids: bool) -> None:
        self._connection = connection
        self._site = connection.site
        self._call_at = connection.site.clock.call_at
        self._num_tokens = num_tokens
        self._with_ids = with_ids
        self._index = 0
        self._checksum = 0
        self._due = 0.0

    def begin(self, prefill_end: float) -> None:
        now = time.monotonic()
        if self._site.pace.in_steps:
            self._call_at(max(now, prefill_end), self._site.join_batch, self)
        else:
            self._due = max(now, prefill_end) + self._site.pace.token_seconds
            self._call_at(self._due, self._write_and_go_on)

    def _write_and_go_on(self) -> None:
        if self.write_token():
            self._due += self._site.pace.token_seconds
            self._call_at(self._due, self._write_and_go_on)

    def write_token(self) -> bool:
        """Whether there is another one to come."""
        transport = self._connection.transport
        if transport.is_closing():
            return False
        text = b"%d %d" % (self._index, time.monotonic_ns())
        token = event(text)
        # Of what the client has asked for: a router that asks for ids has to take them out again.
        self._checksum = zlib.crc32(token, self._checksum)
        if self._with_ids:
            token = event(text, ids=b"[1234]", prompt_ids=b"null" if self._index else _PROMPT_IDS)
        self._index += 1
        transport.write(b"%x\r\n%b\r\n" % (len(token), token))
        if self._index < self._num_tokens:
            return True
        last = event(b"crc %d" % self._checksum, is_last=True, ids=b"[2]" if self._with_ids else b"null") + DONE
        transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))
        self._connection.end()
        return False


class _Server(asyncio.Protocol):
    """One connection to one of the workers."""

    transport: asyncio.Transport

    def __init__(self, site: _Site, role: str) -> None:
        self.site = site
        self._role = role
        self._is_busy = False
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._request_id = b"none"

    def connection_made(self, transport: Any) -> None:  # uvloop's are no asyncio.Transport
        self.transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        if self._is_busy:
            self.end()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url, self._body = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._request_id = value

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        match self._url.partition(b"?")[0]:
            case b"/health" | b"/ping":
                self._write_whole(b"")
            case b"/metrics":
                text = _METRICS.format(
                    role=self._role, port=self.site.control.port, running=self.site.running[self._role]
                )
                self._write_whole(text.encode(), b"text/plain")
            case b"/v1/models":
                self._write_whole(_MODELS)
            case b"/v1/completions":
                self._is_busy = True
                self.site.running[self._role] += 1
                self._generate(_asked_decoder.decode(b"".join(self._body)))
            case _:
                self._write_whole(b'{"error":"not here"}', status=b"404 Not Found")

    def end(self) -> None:
        """A generation has ended."""
        self._is_busy = False
        self.site.running[self._role] -= 1

    def _generate(self, asked: _Asked) -> None:
        params = asked.kv_transfer_params or {}
        if not asked.stream:
            key, end = self.site.prefill(params.get("transfer_id"))
            self.site.clock.call_at(end, self._answer_prefill, key)
            return
        self.transport.write(_STREAM_HEAD % self._request_id)
        stream = _Stream(self, asked.max_tokens, with_ids=asked.return_token_ids)
        if params.get("do_remote_prefill"):
            self.site.when_prefilled(params["transfer_id"], stream.begin)
        else:
            stream.begin(time.monotonic() + self.site.pace.prefill_seconds)

    def _answer_prefill(self, transfer_id: str) -> None:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_engine_id": "kv_producer",
            "remote_request_id": transfer_id,
            "remote_block_ids": [list(range(256))],
            "remote_host": "127.0.0.1",
            "remote_port": 9,
            "tp_size": 1,
        }
        choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        usage = {"prompt_tokens": 4096, "total_tokens": 4097, "completion_tokens": 1}
        answer = {"id": "cmpl-p", "object": "text_completion", "created": 1764460800, "model": "model"}
        self._write_whole(
            msgspec.json.encode(answer | {"choices": [choice], "usage": usage, "kv_transfer_params": params})
        )
        self.end()

    def _write_whole(self, body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> None:
        if not self.transport.is_closing():
            head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (status, kind, len(body))
            self.transport.write(head + body)


def serve_engines(pipe: Connection, cpus: set[int]) -> None:
    """A process with both workers. Sends the ports of P and of D, then takes a `Pace` whenever one comes."""
    uvloop.run(_serve(pipe, cpus))


async def _serve(pipe: Connection, cpus: set[int]) -> None:
    os.sched_setaffinity(0, cpus)
    gc.disable()  # its pauses are not the router's
    loop = asyncio.get_running_loop()
    site = _Site(Pace(0.05, 0.025))
    ports = []
    for role in site.running:
        server = await loop.create_server(partial(_Server, site, role), "127.0.0.1", 0, backlog=4096)
        ports.append(server.sockets[0].getsockname()[1])
    ended = asyncio.Event()

    def take() -> None:
        try:
            asked = pipe.recv()
        except EOFError:
            asked = None
        if asked is None:
            loop.remove_reader(pipe.fileno())
            ended.set()
        else:
            site.pace = asked

    loop.add_reader(pipe.fileno(), take)
    pipe.send(ports)
    await ended.wait()
