"""The two legs as HTTP: each is one request to an engine, and ends in one event for the request's life.

Closing the connection is how a leg is aborted: vLLM ends a request whose client has gone, and its connector then frees
what the transfer held. `close` does that.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kvberth.router.answer import Header, StreamBrokenError, Streamed, Whole
from kvberth.router.breaker import Outcome
from kvberth.router.engine_client import EngineClient
from kvberth.router.engine_connection import ConnectTimeoutError, HttpError
from kvberth.router.engines import Engine
from kvberth.router.errors import Failure, FailureKind, Leg
from kvberth.router.events import DecodeAnswered, DecodeFailed, PrefillAnswered, PrefillFailed, PrefillRejected
from kvberth.router.forms import begins_with_failure, is_preamble, readable_error
from kvberth.router.headers import JSON, response_headers
from kvberth.router.request import take_transfer_params, without_transfer_params

__all__ = ["DecodeEvent", "DecodeLeg", "PrefillEvent", "PrefillLeg", "outcome_of"]

PrefillEvent = PrefillAnswered | PrefillRejected | PrefillFailed
DecodeEvent = DecodeAnswered | DecodeFailed
_Event = TypeVar("_Event", PrefillEvent, DecodeEvent)

_EVENT_STREAM = "text/event-stream"
# Of a stream, what is read before its client is there to take it.
_MOST_UNREAD_BYTES = 64 * 1024


class _Leg(Generic[_Event]):
    """One request to an engine, on its way from the moment that it is made. For the event loop's thread.

    `ended` is the event that it ended in; None until then, and for one that is closed.

    Args:
        seconds: see `set_clock`.
        on_end: called once, with None for a leg that is closed before its end.
    """

    _name: Leg

    def __init__(
        self,
        client: EngineClient,
        engine: Engine,
        path: str,
        *,
        headers: list[Header],
        body: bytes,
        seconds: float | None,
        on_end: Callable[[_Event | None], None],
    ) -> None:
        self.ended: _Event | None = None
        self._engine = engine
        self._path = path
        self._on_end: Callable[[_Event | None], None] = on_end
        self._is_closed = False
        self._status = 0
        self._headers: list[Header] = []
        self._content: list[bytes] = []
        self._clock: asyncio.TimerHandle | None = None
        self._ask = client.ask("POST", engine.url, path, self, headers=headers, body=body)
        self.set_clock(seconds)
        engine.on_silent[self] = self._hear_silence

    def set_clock(self, seconds: float | None) -> None:
        """From now, the time until an answer, or a stream's first bytes; None is no limit."""
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
        if seconds is not None:
            self._clock = asyncio.get_running_loop().call_later(seconds, self._lose_patience)

    def close(self) -> None:
        """End it and its connection, whatever it is at."""
        if self._is_closed:
            return
        self._is_closed = True
        self._engine.on_silent.pop(self, None)
        self._ask.close()
        if self.ended is None:
            self.set_clock(None)
            self._tell(None)

    def on_head(self, status: int, headers: list[Header]) -> None:
        self._status, self._headers = status, headers

    def on_body(self, data: bytes, is_last: bool) -> None:
        self._content.append(data)

    def on_end(self, error: HttpError | None) -> None:
        raise NotImplementedError

    def _failed(self, failure: Failure) -> _Event:
        raise NotImplementedError

    def _end(self, event: _Event) -> None:
        """The connection is left alone: it is free again, or has a stream's rest to come."""
        self.ended = event
        self.set_clock(None)
        self._tell(event)

    def _tell(self, event: _Event | None) -> None:
        on_end, self._on_end = self._on_end, _ignore  # it knows the exchange, and with it this leg
        on_end(event)

    def _end_with_error(self, error: HttpError) -> None:
        self._engine.on_silent.pop(self, None)
        # Whoever refuses, resets or hangs up is gone for now; the watch finds out when it is back.
        self._engine.mark_unready(str(error))
        kind = FailureKind.CONNECT_TIMEOUT if isinstance(error, ConnectTimeoutError) else FailureKind.UNREACHABLE
        self._end(self._failed(Failure(self._name, kind, f"{self._engine.url}: {error}")))

    def _lose_patience(self) -> None:
        # Slow is not gone: an engine with a long queue stays in service.
        self._give_up(FailureKind.FIRST_TOKEN_TIMEOUT, f"{self._engine.url}: nothing came in time")

    def _hear_silence(self) -> None:
        self._give_up(FailureKind.SILENT, f"{self._engine.url} answers nobody")

    def _give_up(self, kind: FailureKind, detail: str) -> None:
        if self._is_closed or self.ended is not None:
            return
        self._engine.on_silent.pop(self, None)
        self._ask.close()
        self._end(self._failed(Failure(self._name, kind, detail)))


class PrefillLeg(_Leg[PrefillEvent]):
    """P's leg. Its answer is one token that nobody reads, and the transfer's parameters."""

    _name = "prefill"

    def on_end(self, error: HttpError | None) -> None:
        if error is not None:
            self._end_with_error(error)
            return
        engine = self._engine
        engine.on_silent.pop(self, None)
        engine.heard_at = time.monotonic()
        answer = b"".join(self._content)
        if self._status == 200:
            self._end(PrefillAnswered(take_transfer_params(answer)))
        elif 400 <= self._status < 500:
            self._end(PrefillRejected(Whole(self._status, response_headers(self._headers), answer)))
        else:
            self._end(self._failed(_server_error(self._name, f"{engine.url} answered {self._status}")))

    def _failed(self, failure: Failure) -> PrefillEvent:
        return PrefillFailed(failure)


class DecodeLeg(_Leg[DecodeEvent]):
    """D's leg. It ends with its answer's first bytes (a stream) or with all of it, and is then the stream's rest.

    vLLM sends the head of a stream before it has scheduled the request, and of Responses two events as well, so these
    prove nothing: until the first bytes behind them the answer may still come from somewhere else. Those may be an
    error. Who made the leg closes it and with it the stream.
    """

    _name = "decode"
    _is_stream = False
    _is_over = False
    _problem: StreamBrokenError | None = None
    _take: Callable[[bytes, bool], None] | None = None
    _tell_end: Callable[[StreamBrokenError | None], None] | None = None

    def on_head(self, status: int, headers: list[Header]) -> None:
        super().on_head(status, headers)
        self._is_stream = status == 200 and _media_type(headers) == _EVENT_STREAM

    def on_body(self, data: bytes, is_last: bool) -> None:
        if self._take is not None:
            self._engine.heard_at = time.monotonic()
            self._take(data, is_last)
            return
        self._content.append(data)
        if not self._is_stream:
            return
        if self.ended is None:
            content = b"".join(self._content)
            if not is_preamble(self._path, content):
                self._answer_stream(content)
        elif sum(map(len, self._content)) > _MOST_UNREAD_BYTES:
            self._ask.pause()

    def on_end(self, error: HttpError | None) -> None:
        if self.ended is not None:
            self._end_stream(error)
        elif error is not None:
            self._end_with_error(error)
        elif self._is_stream and (content := b"".join(self._content)):
            self._answer_stream(content)
            self._end_stream(None)
        else:
            self._engine.on_silent.pop(self, None)
            self._answer_whole(b"".join(self._content))

    def pass_to(
        self, take: Callable[[bytes, bool], None], tell_end: Callable[[StreamBrokenError | None], None]
    ) -> None:
        """Give the stream's rest to `take` as it comes, and its end to `tell_end`, with why if it has broken."""
        self._take, self._tell_end = take, tell_end
        unread, self._content = b"".join(self._content), []
        if unread:
            take(unread, self._is_over and self._problem is None)
        if self._is_over:
            tell_end(self._problem)
        else:
            self._ask.resume()

    def close(self) -> None:
        super().close()
        self.ended = self._take = self._tell_end = None  # they know the stream, and with it this leg

    def pause(self) -> None:
        self._ask.pause()

    def resume(self) -> None:
        self._ask.resume()

    def _answer_stream(self, content: bytes) -> None:
        self._content = []
        self._engine.heard_at = time.monotonic()
        stream = Streamed(self._status, response_headers(self._headers), content, self)
        if begins_with_failure(content):
            failure = _server_error(self._name, f"{self._engine.url} began its stream with an error")
            self._end(DecodeFailed(failure, stream))
        else:
            self._end(DecodeAnswered(stream))

    def _answer_whole(self, content: bytes) -> None:
        url, status = self._engine.url, self._status
        self._engine.heard_at = time.monotonic()
        if status == 200 and not content:
            text = f"{url} answered 200 and nothing else"
            self._end(DecodeFailed(Failure(self._name, FailureKind.UNREACHABLE, text)))
            return
        kept = response_headers(self._headers)
        if status < 500:
            self._end(DecodeAnswered(Whole(status, kept, without_transfer_params(content))))
            return
        headers_without_type = tuple(header for header in kept if header[0] != "content-type")
        said = readable_error(self._path, status, content, leg=self._name)
        failure = _server_error(self._name, f"{url} answered {status}")
        self._end(DecodeFailed(failure, Whole(status, (*headers_without_type, JSON), said)))

    def _end_stream(self, error: HttpError | None) -> None:
        self._is_over = True
        self._engine.on_silent.pop(self, None)
        if error is not None:
            if self._engine.is_ready:
                self._engine.mark_unready(str(error))
            self._problem = StreamBrokenError(f"{self._engine.url}: {error}")
        if self._tell_end is not None:
            self._tell_end(self._problem)

    def _hear_silence(self) -> None:
        if self.ended is None:
            super()._hear_silence()
        elif not self._is_closed and not self._is_over:
            self._ask.close()
            self._end_stream(HttpError("answers nobody"))

    def _failed(self, failure: Failure) -> DecodeEvent:
        return DecodeFailed(failure)


def outcome_of(event: PrefillEvent | DecodeEvent | None) -> Outcome:
    """What a leg proves of its engine with how it ended; None was cut short."""
    match event:
        case None:
            return Outcome.UNDECIDED
        case PrefillFailed(failure) | DecodeFailed(failure):
            is_slow = failure.kind is FailureKind.FIRST_TOKEN_TIMEOUT
            return Outcome.UNDECIDED if is_slow else Outcome.FAILURE
        case DecodeAnswered(answer) if answer.status >= 500:
            return Outcome.FAILURE
        case _:
            return Outcome.SUCCESS


def _ignore(_event: object) -> None:
    pass


def _server_error(leg: Leg, detail: str) -> Failure:
    return Failure(leg, FailureKind.SERVER_ERROR, detail)


def _media_type(headers: list[Header]) -> str:
    said = next((value for name, value in headers if name == "content-type"), "")
    return said.partition(";")[0].strip().lower()
