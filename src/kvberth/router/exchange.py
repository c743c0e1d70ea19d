"""One request's two legs as tasks: carries out the actions of its life and feeds it what comes of them."""

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp

from kvberth.router.answer import Answer, Header, Streamed
from kvberth.router.binding import Binding, JustInTime, PrefillProgress
from kvberth.router.config import Mode, RouterConfig
from kvberth.router.control import Control
from kvberth.router.engines import Engine, EngineInfo, Fleet
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
from kvberth.router.request import ClientRequest

__all__ = ["Exchange", "Load", "Service"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Load:
    """How many requests the router works on at the moment."""

    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Service:
    """What all requests of one router share."""

    config: RouterConfig
    fleet: Fleet
    metrics: Metrics
    session: aiohttp.ClientSession
    control: Control
    load: Load


class Exchange:
    """The legs of one request. `close` must be called, whatever happened: it ends what still runs."""

    def __init__(
        self, service: Service, request: ClientRequest, mode: Mode, binding: Binding, headers: list[Header]
    ) -> None:
        self.life = Life(
            service.fleet,
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
        self._decode_engine: Engine | None = None
        self._delivered: Answer | None = None
        self._transfer: tuple[EngineInfo, str] | None = None
        self._moment: asyncio.Future[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._just_in_time: JustInTime | None = None
        self._watched: str | None = None

    async def settle(self) -> Answer:
        """Run the legs until it is clear what the client gets. Raises `RouterError` if that is an error of ours."""
        actions = self.life.begin()
        while True:
            for action in actions:
                match action:
                    case StartPrefill(engine, transfer_id, transfer_params):
                        self._abandon_transfer()
                        self._transfer = (engine.info, transfer_id) if engine.info is not None else None
                        self._start_prefill(engine, transfer_params)
                    case AwaitMoment(engine, transfer_id):
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
                        return answer
                    case Refuse(error):
                        raise error
            actions = self.life.handle(await self._next_event())

    async def close(self) -> None:
        """Abort whatever is still on its way, and let P know that nobody will come for its blocks."""
        if self._delivered is None:
            self._abandon_transfer()
        if isinstance(self._delivered, Streamed):
            self._delivered.rest.close()
        await self._end_decode()
        await self._end_prefill()
        self._end_wait()

    async def _next_event(self) -> Event:
        legs: set[asyncio.Future[Any]] = {leg for leg in (self._decode, self._prefill) if leg is not None}
        if self._moment is not None:
            legs.add(self._moment)
        await asyncio.wait(legs, return_when=asyncio.FIRST_COMPLETED)
        # If both are done, D's answer counts: it is whole even where P has failed meanwhile.
        if self._decode is not None and self._decode.done():
            event: Event = self._decode.result()
            self._decode = None
            if isinstance(event, DecodeFailed):
                await self._end_decode()
            return event
        if self._moment is not None and self._moment.done() and not (self._prefill and self._prefill.done()):
            self._moment = None
            return BindNow()
        if self._prefill is None:
            raise RuntimeError("no leg is left to wait for")
        self._end_wait()
        event = self._prefill.result()
        self._prefill = None
        return event

    def _start_prefill(self, engine: Engine, transfer_params: bytes) -> None:
        # Counted here and not in the task, so that a choice in the same instant sees it.
        fleet = self._service.fleet
        fleet.enter(engine)
        started = time.monotonic()
        observe = self._service.metrics.prefill_leg.labels(self.life.path).observe

        def finish(leg: asyncio.Task[Any]) -> None:
            fleet.leave(engine)
            if not leg.cancelled():
                observe(time.monotonic() - started)

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
        """Follow the prefill; the future is done when it is time to bind."""
        if engine.info is None:
            return
        self._end_wait()
        self._moment = moment = asyncio.get_running_loop().create_future()
        self._just_in_time = JustInTime(engine.pace, self._service.config.bind_margin_seconds)
        self._watched = transfer_id
        self._service.control.watch(engine.info, transfer_id, partial(self._hear, self._just_in_time, moment))

    def _hear(self, plan: JustInTime, moment: "asyncio.Future[None]", progress: PrefillProgress) -> None:
        loop = asyncio.get_running_loop()
        plan.told(progress, time.monotonic())
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if plan.bind_at is not None and not moment.done():
            self._alarm = loop.call_later(max(0.0, plan.bind_at - time.monotonic()), _ring, moment)

    def _end_wait(self) -> None:
        """Whoever is to be bound is, or nobody will be; what is still said of the setup is heard until the end."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._watched is not None:
            self._service.control.unwatch(self._watched)
            self._watched = None
        self._moment = None

    def _start_decode(self, engine: Engine, transfer_params: bytes | None) -> None:
        # Counted until `_end_decode`: the engine is busy for as long as it streams.
        self._service.fleet.enter(engine)
        self._decode_engine = engine
        if self._just_in_time is not None:
            self._just_in_time.sent(time.monotonic())
        config = self._service.config
        self._decode = asyncio.create_task(
            run_decode_leg(
                self._service.session,
                engine,
                self._request.endpoint,
                headers=self._headers,
                body=self._request.decode_body(transfer_params),
                first_token_timeout_seconds=config.first_token_timeout_seconds if self._request.is_streamed else None,
            )
        )

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
        engine, self._decode_engine = self._decode_engine, None
        if engine is not None:
            self._service.fleet.leave(engine)
        if leg is not None:
            await abandon(leg)


def _ring(moment: "asyncio.Future[None]") -> None:
    if not moment.done():
        moment.set_result(None)
