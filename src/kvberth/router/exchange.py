"""One request's two legs as tasks: carries out the actions of its life and feeds it what comes of them."""

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvberth.router.admission import Admission
from kvberth.router.answer import Answer, Header, Streamed
from kvberth.router.binding import Binding
from kvberth.router.breaker import Outcome
from kvberth.router.choice import RequestFacts
from kvberth.router.config import Mode, RouterConfig
from kvberth.router.control import Control
from kvberth.router.engines import Engine, EngineInfo
from kvberth.router.errors import FailureKind
from kvberth.router.fleet import Fleet, Visit
from kvberth.router.legs import abandon, run_decode_leg, run_prefill_leg
from kvberth.router.life import (
    AbortDecode,
    AbortPrefill,
    AwaitMoment,
    BindNow,
    DecodeAnswered,
    DecodeFailed,
    Deliver,
    Event,
    Life,
    PrefillAnswered,
    PrefillFailed,
    PrefillRejected,
    Refuse,
    Retry,
    StartDecode,
    StartPrefill,
)
from kvberth.router.metrics import Metrics
from kvberth.router.moment import Moment
from kvberth.router.request import ClientRequest
from kvberth.router.roster import Roster

__all__ = ["Exchange", "Service"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """What all requests of one router share."""

    config: RouterConfig
    fleet: Fleet
    roster: Roster
    metrics: Metrics
    session: aiohttp.ClientSession
    control: Control
    admission: Admission


class Exchange:
    """The legs of one request. `close` must be called, whatever happened: it ends what still runs."""

    def __init__(
        self, service: Service, request: ClientRequest, mode: Mode, binding: Binding, headers: list[Header]
    ) -> None:
        self._facts = RequestFacts(request.estimated_prompt_tokens, request.prefixes)
        self.life = Life(
            service.fleet.for_request(self._facts, time.monotonic),
            mode=mode,
            binding=binding,
            obstacle=request.obstacle,
            num_consumers=request.num_consumers,
            new_transfer_id=lambda: str(uuid.uuid4()),
        )
        self._service = service
        self._request = request
        self._headers = headers
        self._prefill: asyncio.Task[PrefillAnswered | PrefillRejected | PrefillFailed] | None = None
        self._decode: asyncio.Task[DecodeAnswered | DecodeFailed] | None = None
        self._decode_visit: Visit | None = None
        self._decode_clock = asyncio.timeout(None)
        self._kv_source: Engine | None = None
        self._prefill_began: float | None = None
        self._prefill_seconds = 0.0
        self._delivered: Answer | None = None
        self._transfer: tuple[EngineInfo, str] | None = None
        self._moment: Moment | None = None
        self._is_bound = False

    async def settle(self) -> Answer:
        """Run the legs until it is clear what the client gets. Raises `RouterError` if that is an error of ours."""
        actions = self.life.begin()
        while True:
            for action in actions:
                match action:
                    case StartPrefill(engine, transfer_id, transfer_params):
                        self._abandon_transfer()
                        self._transfer = (engine.info, transfer_id) if engine.info is not None else None
                        self._take_kv_from(engine)
                        self._start_prefill(engine, transfer_params)
                    case AwaitMoment(engine, transfer_id):
                        self._is_bound = False
                        self._await_moment(engine, transfer_id)
                    case StartDecode(engine, transfer_params):
                        self._start_decode(engine, transfer_params)
                    case AbortPrefill():
                        await self._end_prefill()
                    case AbortDecode():
                        await self._end_decode()
                    case Retry(failure):
                        logger.warning("%s leg failed, trying on: %s", failure.leg, failure.detail)
                        self._service.metrics.retries.labels(failure.leg, failure.kind).inc()
                    case Deliver(answer):
                        self._delivered = answer
                        self._take_kv_from(None)  # with D's first bytes all of it has arrived
                        self._stop_prefill_clock()
                        return answer
                    case Refuse(error):
                        raise error
            actions = self.life.handle(await self._next_event())

    def prefill_seconds(self) -> float:
        """For how long prefill legs have held the answer up, one that still runs included."""
        running = 0.0 if self._prefill_began is None else time.monotonic() - self._prefill_began
        return self._prefill_seconds + running

    async def close(self) -> None:
        """Abort whatever is still on its way, and let P know that nobody will come for its blocks."""
        if self._delivered is None:
            self._abandon_transfer()
        self._take_kv_from(None)
        if isinstance(self._delivered, Streamed):
            self._delivered.rest.close()
        await self._end_decode()
        await self._end_prefill()
        self._end_wait()

    async def _next_event(self) -> Event:
        legs: set[asyncio.Future[Any]] = {leg for leg in (self._decode, self._prefill) if leg is not None}
        moment = self._moment.has_come if self._moment is not None and not self._is_bound else None
        if moment is not None:
            legs.add(moment)
        await asyncio.wait(legs, return_when=asyncio.FIRST_COMPLETED)
        # If both are done, D's answer counts: it is whole even where P has failed meanwhile.
        if self._decode is not None and self._decode.done():
            event: Event = self._decode.result()
            self._decode = None
            if isinstance(event, DecodeFailed):
                await self._end_decode()
            return event
        if moment is not None and moment.done() and not (self._prefill and self._prefill.done()):
            self._is_bound = True
            return BindNow()
        if self._prefill is None:
            raise RuntimeError("no leg is left to wait for")
        self._end_wait()
        event = self._prefill.result()
        self._prefill = None
        seconds = self._first_token_seconds()
        if self._decode is not None and not self._decode.done() and seconds is not None:
            # Until now D could only wait for P, whose own clock ran.
            self._decode_clock.reschedule(asyncio.get_running_loop().time() + seconds)
        return event

    def _start_prefill(self, engine: Engine, transfer_params: bytes) -> None:
        # Counted here and not in the task, so that a choice in the same instant sees it.
        fleet = self._service.fleet
        visit = fleet.enter(engine, self._facts, time.monotonic())
        self._prefill_began = visit.started_at
        observe = self._service.metrics.prefill_leg.labels(self.life.path).observe

        def finish(leg: asyncio.Task[Any]) -> None:
            now = time.monotonic()
            if _has_prefilled(leg):
                fleet.prefilled(visit, now)
            fleet.report(visit, _outcome(leg), now)
            fleet.leave(visit)
            self._stop_prefill_clock()
            if not leg.cancelled():
                observe(now - visit.started_at)

        self._prefill = asyncio.create_task(
            run_prefill_leg(
                self._service.session,
                engine,
                self._request.endpoint,
                headers=self._headers,
                body=self._request.prefill_body(transfer_params),
                first_token_timeout_seconds=self._service.config.first_token_timeout_seconds,
            )
        )
        self._prefill.add_done_callback(finish)

    def _await_moment(self, engine: Engine, transfer_id: str) -> None:
        self._end_wait()
        if engine.info is not None:
            self._moment = Moment(self._service.control, engine, engine.info, transfer_id)

    def _end_wait(self) -> None:
        """Whoever is to be bound is, or nobody will be."""
        moment, self._moment = self._moment, None
        if moment is not None:
            moment.close()

    def _start_decode(self, engine: Engine, transfer_params: bytes | None) -> None:
        # Counted until `_end_decode`: the engine is busy for as long as it streams.
        fleet = self._service.fleet
        visit = self._decode_visit = fleet.enter(engine, self._facts, time.monotonic())
        if self._moment is not None:
            self._moment.sent()
        self._decode_clock = asyncio.timeout(self._first_token_seconds() if self._prefill is None else None)
        self._decode = asyncio.create_task(
            run_decode_leg(
                self._service.session,
                engine,
                self._request.endpoint,
                headers=self._headers,
                body=self._request.decode_body(transfer_params),
                clock=self._decode_clock,
            )
        )
        self._decode.add_done_callback(lambda leg: fleet.report(visit, _outcome(leg), time.monotonic()))

    def _take_kv_from(self, engine: Engine | None) -> None:
        if self._kv_source is not None:
            self._service.fleet.end_transfer(self._kv_source)
        self._kv_source = engine
        if engine is not None:
            self._service.fleet.begin_transfer(engine)

    def _first_token_seconds(self) -> float | None:
        return self._service.config.first_token_timeout_seconds if self._request.is_streamed else None

    def _stop_prefill_clock(self) -> None:
        self._prefill_seconds = self.prefill_seconds()
        self._prefill_began = None

    def _abandon_transfer(self) -> None:
        """A prefill that is finished cannot be aborted, and a decode worker may not have heard of it yet."""
        if self._transfer is not None:
            self._service.control.abandon(*self._transfer, self._request.num_consumers)
            self._transfer = None

    async def _end_prefill(self) -> None:
        leg, self._prefill = self._prefill, None
        if leg is not None:
            await abandon(leg)

    async def _end_decode(self) -> None:
        leg, self._decode = self._decode, None
        visit, self._decode_visit = self._decode_visit, None
        if visit is not None:
            self._service.fleet.leave(visit)
        if leg is not None:
            await abandon(leg)


def _has_prefilled(leg: asyncio.Task[Any]) -> bool:
    return not leg.cancelled() and leg.exception() is None and isinstance(leg.result(), PrefillAnswered)


def _outcome(leg: asyncio.Task[Any]) -> Outcome:
    """What a leg that has ended proves of its engine."""
    if leg.cancelled() or leg.exception() is not None:
        return Outcome.UNDECIDED
    match leg.result():
        case PrefillFailed(failure) | DecodeFailed(failure):
            is_slow = failure.kind is FailureKind.FIRST_TOKEN_TIMEOUT
            return Outcome.UNDECIDED if is_slow else Outcome.FAILURE
        case DecodeAnswered(answer) if answer.status >= 500:
            return Outcome.FAILURE
        case _:
            return Outcome.SUCCESS
