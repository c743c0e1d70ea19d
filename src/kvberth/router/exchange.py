"""One request's two legs: carries out the actions of its life and feeds it what comes of them."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from secrets import token_hex

from kvberth.router.actions import (
    AbortDecode,
    AbortPrefill,
    Deliver,
    Refuse,
    Retry,
    StartDecode,
    StartPrefill,
)
from kvberth.router.admission import Admission
from kvberth.router.answer import Answer, Header, Streamed
from kvberth.router.binding import Binding
from kvberth.router.choice import RequestFacts
from kvberth.router.config import Mode, RouterConfig
from kvberth.router.control import Control
from kvberth.router.engine_client import EngineClient
from kvberth.router.engines import Engine, EngineInfo
from kvberth.router.errors import Failure
from kvberth.router.events import (
    BindNow,
    DecodeBehind,
    DecodeFailed,
    Event,
    HandedOver,
    PrefillAnswered,
    PrefillFailed,
)
from kvberth.router.fleet import Fleet, Visit
from kvberth.router.follow import Follow
from kvberth.router.journal import Journal
from kvberth.router.legs import DecodeEvent, DecodeLeg, PrefillEvent, PrefillLeg, outcome_of
from kvberth.router.life import Life, State
from kvberth.router.metrics import Metrics
from kvberth.router.request import ClientRequest
from kvberth.router.roster import Roster
from kvberth.router.timeline import Timeline, What
from kvberth.router.tracing import Tracing
from kvberth.router.watch import Watch

__all__ = ["Exchange", "Service"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """What all requests of one router share."""

    config: RouterConfig
    fleet: Fleet
    roster: Roster
    watch: Watch
    metrics: Metrics
    client: EngineClient
    control: Control
    admission: Admission
    journal: Journal
    tracing: Tracing


class Exchange:
    """The legs of one request. `close` must be called, whatever happened: it ends what still runs.

    Args:
        new_headers: makes the headers of one more leg.
        timeline: what happens is noted there.
        max_retries, failed_decodes: see `Life`.
        with_token_ids: the decode worker is asked for the ids of its tokens.
    """

    def __init__(
        self,
        service: Service,
        request: ClientRequest,
        *,
        mode: Mode,
        binding: Binding,
        new_headers: Callable[[], list[Header]],
        timeline: Timeline,
        max_retries: int,
        failed_decodes: Collection[Engine] = (),
        with_token_ids: bool = False,
    ) -> None:
        self._facts = RequestFacts(request.estimated_prompt_tokens, request.prefixes, request.prompt_bytes)
        self.life = Life(
            service.fleet.for_request(self._facts, time.monotonic),
            mode=mode,
            binding=binding,
            obstacle=request.obstacle,
            num_consumers=request.num_consumers,
            new_transfer_id=lambda: token_hex(16),
            max_retries=max_retries,
            failed_decodes=failed_decodes,
        )
        self._service = service
        self._request = request
        self._new_headers = new_headers
        self._timeline = timeline
        self._with_token_ids = with_token_ids
        self._prefill: PrefillLeg | None = None
        self._decode: DecodeLeg | None = None
        self._decode_visit: Visit | None = None
        self._kv_source: Engine | None = None
        self._prefill_began: float | None = None
        self._prefill_seconds = 0.0
        self._delivered: Answer | None = None
        self._transfer: tuple[EngineInfo, str] | None = None
        self._attempt = 0
        self._follow: Follow | None = None
        self._to_follow: Engine | None = None
        self._news: asyncio.Future[None] | None = None
        self._told: deque[Event] = deque()

    async def settle(self) -> Answer:
        """Run the legs until it is clear what the client gets. Raises `RouterError` if that is an error of ours."""
        event: Event | None = None
        actions = self.life.begin()
        while True:
            for action in actions:
                match action:
                    case StartPrefill():
                        self._begin_transfer(action)
                    case StartDecode():
                        self._start_decode(action)
                    case AbortPrefill():
                        self._end_prefill()
                    case AbortDecode():
                        self._end_decode()
                    case Retry(failure):
                        logger.warning("%s leg failed, trying on: %s", failure.leg, failure.detail)
                        self._note(What.RETRIED, leg=failure.leg, reason=failure.kind)
                    case Deliver(answer):
                        self._delivered = answer
                        self._take_kv_from(None)  # with D's first bytes all of it has arrived
                        self._stop_prefill_clock()
                        self._end_follow()
                        return answer
                    case Refuse(error):
                        raise error
            if isinstance(event, DecodeFailed) and isinstance(event.answer, Streamed):
                event.answer.rest.close()
            self._begin_follow()
            event = await self._next_event()
            actions = self.life.handle(event)

    def prefill_seconds(self) -> float:
        """For how long prefill legs have held the answer up, one that still runs included."""
        running = 0.0 if self._prefill_began is None else time.monotonic() - self._prefill_began
        return self._prefill_seconds + running

    def close(self) -> None:
        """Abort whatever is still on its way, and let P know that nobody will come for its blocks."""
        if self._delivered is None:
            self._abandon_transfer()
        self._take_kv_from(None)
        if isinstance(self._delivered, Streamed):
            self._delivered.rest.close()
        self._end_decode()
        self._end_prefill()
        self._end_follow()
        # Who knows whom in a circle is left to the collector, and with hundreds of streams it stops them all for 0.1 s.
        self._delivered = None
        self._new_headers = list

    async def _next_event(self) -> Event:
        while True:
            if self._told:
                event = self._told.popleft()
                if isinstance(event, BindNow) and not self._is_stale(event):
                    await self._refresh_loads()
                if not self._is_stale(event):
                    return event
            # If both have come, D's answer counts: it is whole even where P has failed meanwhile.
            elif self._decode is not None and (decoded := self._decode.ended) is not None:
                return self._decode_ended(decoded)
            elif self._prefill is not None and (prefilled := self._prefill.ended) is not None:
                return await self._prefill_ended(prefilled)
            else:
                self._news = asyncio.get_running_loop().create_future()
                await self._news

    def _is_stale(self, event: Event) -> bool:
        """Whether what was told has been overtaken by a leg's end."""
        match event:
            case BindNow():
                return (
                    self.life.state is not State.PREFILLING or self._prefill is None or self._prefill.ended is not None
                )
            case DecodeBehind():
                return self.life.state is not State.DECODING or self._decode is None or self._decode.ended is not None
            case _:
                return False

    def _decode_ended(self, event: DecodeEvent) -> Event:
        self._decode = None
        if isinstance(event, DecodeFailed):
            self._note_failure(event.failure)
            self._leave_decode()
        return event

    async def _prefill_ended(self, event: PrefillEvent) -> Event:
        self._prefill = None
        match event:
            case PrefillAnswered():
                self._note_once(What.PREFILL_DONE)
                if self.life.state is State.PREFILLING:
                    await self._refresh_loads()
                elif self._follow is not None:
                    self._follow.expect_registration()
            case PrefillFailed(failure):
                self._note_failure(failure)
        if self._decode is not None and self._decode.ended is None:
            # Until now D could only wait for P, whose own clock ran.
            self._decode.set_clock(self._first_token_seconds())
        return event

    async def _refresh_loads(self) -> None:
        """Have the decode workers' loads as they are now, if there is a choice to make."""
        if self._follow is not None:
            self._follow.choosing()
        await self._service.watch.refresh(self._service.fleet.decode)

    def _begin_transfer(self, action: StartPrefill) -> None:
        engine, transfer_id = action.engine, action.transfer_id
        self._abandon_transfer()
        self._end_follow()
        self._attempt = 0
        self._take_kv_from(engine)
        self._note(What.PREFILL_SENT, engine=engine.url, reason=action.reason, transfer_id=transfer_id)
        self._note(What.BINDING_CHOSEN, binding=self.life.binding, reason=self.life.binding_reason)
        if engine.info is not None:
            self._transfer = (engine.info, transfer_id)
            self._to_follow = engine
        self._start_prefill(engine, action.transfer_params)

    def _begin_follow(self) -> None:
        """Behind both legs, which somebody waits for."""
        engine, self._to_follow = self._to_follow, None
        if engine is None or self._transfer is None:
            return
        self._follow = Follow(
            self._service.control,
            engine,
            *self._transfer,
            on_moment=None if self.life.binding is Binding.EARLY else self._moment_has_come,
            on_prefilled=self._bind_now,
            on_behind=lambda: self._tell(DecodeBehind()),
            on_handed_over=lambda is_prefilled: self._tell(HandedOver(is_prefilled)),
            note=self._note,
        )

    def _moment_has_come(self) -> None:
        if self.life.binding is Binding.JIT:
            self._bind_now()
        elif self.life.state is State.PREFILLING:
            self._service.watch.begin_refresh(self._service.fleet.decode)  # for the choice behind the prefill

    def _bind_now(self) -> None:
        if self.life.state is State.PREFILLING:
            self._tell(BindNow())

    def _tell(self, event: Event) -> None:
        self._told.append(event)
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _start_prefill(self, engine: Engine, transfer_params: bytes) -> None:
        fleet = self._service.fleet

        def finish(event: PrefillEvent | None) -> None:
            now = time.monotonic()
            if isinstance(event, PrefillAnswered):
                fleet.prefilled(visit, now)
            fleet.report(visit, outcome_of(event), now)
            fleet.leave(visit)
            self._stop_prefill_clock()
            self._wake()

        self._prefill = PrefillLeg(
            self._service.client,
            engine,
            self._request.endpoint,
            headers=self._new_headers(),
            body=self._request.prefill_body(transfer_params),
            seconds=self._service.config.first_token_timeout_seconds,
            on_end=finish,
        )
        visit = fleet.enter(engine, self._facts, time.monotonic())
        self._prefill_began = visit.started_at

    def _start_decode(self, action: StartDecode) -> None:
        engine, fleet = action.engine, self._service.fleet
        self._leave_decode()
        self._attempt = action.attempt
        if action.transfer_params is None:
            self._end_follow()
            self._note(What.LEFT_UNDIVIDED, reason=self.life.undivided_reason or "")
        self._note(What.DECODE_SENT, engine=engine.url, reason=action.reason, attempt=action.attempt)

        def finish(event: DecodeEvent | None) -> None:
            fleet.report(visit, outcome_of(event), time.monotonic())
            self._wake()

        self._decode = DecodeLeg(
            self._service.client,
            engine,
            self._request.endpoint,
            headers=self._new_headers(),
            body=self._request.decode_body(action.transfer_params, with_token_ids=self._with_token_ids),
            seconds=self._first_token_seconds() if self._prefill is None else None,
            on_end=finish,
        )
        # Counted until `_end_decode`: the engine is busy for as long as it streams.
        self._decode_visit = visit = fleet.enter(engine, self._facts, time.monotonic())
        if self._prefill is None and self._follow is not None:
            self._follow.expect_registration()

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
            self._service.control.abandon(*self._transfer, self._request.num_consumers, self._attempt)
            self._transfer = None

    def _end_prefill(self) -> None:
        leg, self._prefill = self._prefill, None
        if leg is not None:
            leg.close()

    def _end_decode(self) -> None:
        leg, self._decode = self._decode, None
        self._leave_decode()
        if leg is not None:
            leg.close()

    def _leave_decode(self) -> None:
        visit, self._decode_visit = self._decode_visit, None
        if visit is not None:
            self._service.fleet.leave(visit)

    def _end_follow(self) -> None:
        follow, self._follow = self._follow, None
        self._to_follow = None
        self._told.clear()
        if follow is not None:
            follow.close()

    def _note(self, what: What, **facts: str | int | float) -> None:
        self._timeline.note(time.monotonic(), what, **facts)

    def _note_once(self, what: What) -> None:
        """If it has not been noted since the prefill leg was sent."""
        since, at = self._timeline.last(What.PREFILL_SENT), self._timeline.last(what)
        if at is None or (since is not None and at < since):
            self._note(what)

    def _note_failure(self, failure: Failure) -> None:
        self._note(What.LEG_FAILED, leg=failure.leg, kind=failure.kind, detail=failure.detail)
