"""One request's life up to the moment its answer is settled: events in, actions out. No I/O and no clock.

    bound early          begin -> BOTH -------------------- P answered -> DECODING -- D answered --> SETTLED
    bound just in time   begin -> PREFILLING -- now -> BOTH -- P answered -> DECODING -- D answered --> SETTLED
    bound late, and pull the same, and now is when P has computed the prompt
    P cannot be heard    begin -> PREFILLING -------------- P answered -> DECODING -- D answered --> SETTLED
    undivided            begin ----------------------------------------> DECODING -- D answered --> SETTLED

Until the client has seen a byte, a failure can be hidden. A decode leg that fails, or whose engine has no room when the
prefill is done, is bound again to another decode worker: the transfer goes on as its next attempt, and what P has
computed is kept. Where P has handed the KV to the one that failed, and where P fails, a new transfer begins with both
legs anew. A prefill leg is tried once more on another engine, and then the request is served undivided; a decode leg
`max_retries` times, because a request that kills engines must not be shown to all of them.

After SETTLED only bytes flow. The caller ends a leg that is still running when the answer is complete.
"""

from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Any, Protocol

from kvberth.router.actions import (
    AbortDecode,
    AbortPrefill,
    Action,
    Deliver,
    Refuse,
    Retry,
    StartDecode,
    StartPrefill,
)
from kvberth.router.binding import Binding
from kvberth.router.choice import BindingChoice, Choice
from kvberth.router.config import Mode
from kvberth.router.engines import Engine
from kvberth.router.errors import Failure, FailureKind, Leg, RouterError
from kvberth.router.events import (
    BindNow,
    DecodeAnswered,
    DecodeBehind,
    DecodeFailed,
    Event,
    HandedOver,
    PrefillAnswered,
    PrefillFailed,
    PrefillRejected,
)
from kvberth.router.transfer import decode_params, prefill_params, with_attempt

__all__ = ["Engines", "Life", "State"]

_UNDIVIDED = "undivided"
_PREFILL_TRIES = 2
# Reasons to serve a request undivided that hold for one try only: the next one may find other engines.
_LITTLE_MISSING = "little_missing"


class State(Enum):
    NEW = auto()
    PREFILLING = auto()
    BOTH = auto()
    DECODING = auto()
    SETTLED = auto()


class Engines(Protocol):
    """Who is there to choose from; `Fleet.for_request` in service."""

    def choose_prefill(self, excluded: Collection[Engine] = ()) -> Choice | None: ...
    def choose_decode(self, excluded: Collection[Engine] = ()) -> Choice | None: ...
    def choose_decode_with_room(self, excluded: Collection[Engine] = ()) -> Choice | None: ...
    def choose_binding(self, prefill: Engine) -> BindingChoice: ...
    def lacks_little(self, decode: Engine) -> bool: ...


class Life:
    """Decides what happens next for one request.

    Args:
        obstacle: why it cannot be split, or None.
        max_retries: failures of decode legs that are hidden from the client.
        failed_decodes: decode workers that are not to be chosen.
    """

    def __init__(
        self,
        engines: Engines,
        *,
        mode: Mode,
        binding: Binding = Binding.EARLY,
        obstacle: str | None,
        num_consumers: int,
        new_transfer_id: Callable[[], str],
        max_retries: int = 2,
        failed_decodes: Collection[Engine] = (),
    ) -> None:
        self.state = State.NEW
        self.undivided_reason = obstacle
        self.binding = Binding.LATE if mode is Mode.PULL else binding
        self.binding_reason = "as asked for" if mode is not Mode.PULL else "a pull"
        self.retries_left = max_retries
        self._engines = engines
        self._mode = mode
        self._asked_binding = self.binding
        self._transfer_id = ""
        self._attempt = 0
        self._num_consumers = num_consumers
        self._new_transfer_id = new_transfer_id
        self._failed_prefills: list[Engine] = []
        self._failed_decodes = list(failed_decodes)
        self._prefill: Engine | None = None
        self._decode: Engine | None = None
        self._said_by_prefill: bytes | None = None
        self._handed_over: HandedOver | None = None

    @property
    def path(self) -> str:
        """How the prompt's KV comes to D: `push`, `pull` or `undivided`."""
        return _UNDIVIDED if self.undivided_reason else self._mode.value

    @property
    def awaited_leg(self) -> Leg:
        """The leg that holds the answer up."""
        return "prefill" if self.state in (State.PREFILLING, State.BOTH) else "decode"

    @property
    def decode(self) -> Engine | None:
        """The decode worker that was chosen last."""
        return self._decode

    @property
    def failed_decodes(self) -> tuple[Engine, ...]:
        return tuple(self._failed_decodes)

    def begin(self) -> list[Action]:
        if self.state is not State.NEW:
            raise RuntimeError(f"a request begins once, this one is {self.state.name}")
        return self._start_transfer()

    def handle(self, event: Event) -> list[Action]:
        """The next actions, in order. Raises `RuntimeError` for an event that cannot happen in this state."""
        handler = _HANDLERS.get((self.state, type(event)))
        if handler is None:
            raise RuntimeError(f"{type(event).__name__} cannot happen to a request that is {self.state.name}")
        return handler(self, event)

    def _start_transfer(self) -> list[Action]:
        if self.undivided_reason == _LITTLE_MISSING:
            self.undivided_reason = None
        decode = self._engines.choose_decode(self._failed_decodes)
        if decode is None:
            return self._settle(Refuse(_no_decode_worker()))
        if self.undivided_reason is None and self._engines.lacks_little(decode.engine):
            self.undivided_reason = _LITTLE_MISSING
        if self.undivided_reason:
            return self._start_undivided(decode)
        prefill = self._engines.choose_prefill(self._failed_prefills)
        if prefill is None or prefill.engine.info is None:
            self.undivided_reason = "prefill_failed" if self._failed_prefills else "no_prefill_ready"
            return self._start_undivided(decode)
        self._transfer_id = transfer_id = self._new_transfer_id()
        self._attempt = 0
        self._prefill = prefill.engine
        self._said_by_prefill = self._handed_over = None
        to_prefill = prefill_params(transfer_id, num_consumers=self._num_consumers, mode=self._mode)
        start = StartPrefill(prefill.engine, transfer_id, to_prefill, prefill.reason)
        self.state = State.PREFILLING
        if self._asked_binding is Binding.AUTO:
            chosen = self._engines.choose_binding(prefill.engine)
            self.binding, self.binding_reason = chosen.binding, chosen.reason
        # Otherwise D is chosen on load that is fresh then; that one is there at all was asked above.
        return [start, self._bind(decode)] if self.binding is Binding.EARLY else [start]

    def _bind(self, choice: Choice) -> StartDecode:
        """D registers while P computes."""
        self.state = State.BOTH
        return self._start_decode(choice)

    def _start_decode(self, choice: Choice) -> StartDecode:
        """One more attempt of the transfer that runs, the first one included."""
        self._decode = choice.engine
        if self._said_by_prefill is not None:
            params = with_attempt(self._said_by_prefill, self._attempt)
        else:
            assert self._prefill is not None
            assert self._prefill.info is not None
            params = decode_params(
                self._transfer_id,
                attempt=self._attempt,
                num_consumers=self._num_consumers,
                mode=self._mode,
                producer=self._prefill.info,
            )
        return StartDecode(choice.engine, params, choice.reason, self._attempt)

    def _moment_has_come(self, _event: BindNow) -> list[Action]:
        choice = self._engines.choose_decode(self._failed_decodes)
        if choice is None:
            return self._settle(AbortPrefill(), Refuse(_no_decode_worker()))
        if self._prefill is None or self._prefill.info is None:
            return []  # it has just gone; its leg says so next
        return [self._bind(choice)]

    def _start_undivided(self, choice: Choice) -> list[Action]:
        self.state = State.DECODING
        self._decode = choice.engine
        return [StartDecode(choice.engine, None, choice.reason)]

    def _prefill_done_after_binding(self, event: PrefillAnswered) -> list[Action]:
        self.state = State.DECODING
        self._said_by_prefill = event.transfer_params
        return []

    def _prefill_done_before_binding(self, event: PrefillAnswered) -> list[Action]:
        choice = self._engines.choose_decode(self._failed_decodes)
        if choice is None:
            return self._settle(Refuse(_no_decode_worker()))
        if event.transfer_params is None:
            self.undivided_reason = "no_transfer_params"
            return self._start_undivided(choice)
        self.state = State.DECODING
        self._said_by_prefill = event.transfer_params
        return [self._start_decode(choice)]

    def _prefill_rejected(self, event: PrefillRejected) -> list[Action]:
        return self._settle(*self._abort_decode(), Deliver(event.answer))

    def _prefill_failed(self, event: PrefillFailed) -> list[Action]:
        if self.state is State.BOTH and self._handed_over is not None:
            self.state = State.DECODING  # D has all that it needs
            return []
        aborts = self._abort_decode()
        if not event.failure.is_worth_another_engine:
            return self._settle(*aborts, Refuse(event.failure.as_error()))
        if self._prefill is not None:
            self._failed_prefills.append(self._prefill)
        if len(self._failed_prefills) == _PREFILL_TRIES:
            self.undivided_reason = "prefill_failed"
        return [*aborts, Retry(event.failure), *self._start_transfer()]

    def _all_has_arrived(self, event: HandedOver) -> list[Action]:
        self._handed_over = event
        return []

    def _decode_answered(self, event: DecodeAnswered) -> list[Action]:
        # P computes something that nobody needs, unless its answer is just on the way.
        is_in_vain = self.state is State.BOTH and not (self._handed_over and self._handed_over.is_prefilled)
        return self._settle(*([AbortPrefill()] if is_in_vain else []), Deliver(event.answer))

    def _decode_failed(self, event: DecodeFailed) -> list[Action]:
        choice = None
        if self._decode is not None:
            self._failed_decodes.append(self._decode)
        if event.failure.is_worth_another_engine and self.retries_left > 0:
            choice = self._engines.choose_decode(self._failed_decodes)
        if choice is None:
            aborts: list[Action] = [AbortPrefill()] if self.state is State.BOTH else []
            error = event.failure.as_error(is_final=len(self._failed_decodes) > 1)
            last = Deliver(event.answer) if event.answer is not None else Refuse(error)
            return self._settle(*aborts, last)
        self.retries_left -= 1
        return [Retry(event.failure), *self._bind_again(choice)]

    def _decode_is_behind(self, _event: DecodeBehind) -> list[Action]:
        assert self._decode is not None
        excluded = [*self._failed_decodes, self._decode]
        choice = self._engines.choose_decode_with_room(excluded) if self.retries_left > 0 else None
        if choice is None or self._handed_over is not None:
            return []  # it is in a queue, and all others have one too
        self.retries_left -= 1
        self._failed_decodes = excluded
        behind = Failure("decode", FailureKind.BEHIND, f"{self._decode.url} has no room yet")
        return [AbortDecode(), Retry(behind), *self._bind_again(choice)]

    def _bind_again(self, choice: Choice) -> list[Action]:
        if self.undivided_reason:
            return self._start_transfer() if self.undivided_reason == _LITTLE_MISSING else self._start_undivided(choice)
        if self._handed_over is not None or self._prefill is None or self._prefill.info is None:
            # What P had computed is gone, with the decode worker that it was handed to or with P.
            return [*([AbortPrefill()] if self.state is State.BOTH else []), *self._start_transfer()]
        self._attempt += 1
        return [self._start_decode(choice)]

    def _abort_decode(self) -> list[Action]:
        return [AbortDecode()] if self.state is State.BOTH else []

    def _settle(self, *actions: Action) -> list[Action]:
        self.state = State.SETTLED
        return list(actions)


def _no_decode_worker() -> RouterError:
    return RouterError(
        503, "No decode worker is ready to serve this request.", code="no_decode_worker", retry_after_seconds=1
    )


# What is absent cannot happen: a leg that was aborted is not heard from again.
# `Any` stands for the event named in the key.
_HANDLERS: dict[tuple[State, type[Event]], Callable[[Life, Any], list[Action]]] = {
    (State.PREFILLING, BindNow): Life._moment_has_come,
    (State.PREFILLING, HandedOver): Life._all_has_arrived,
    (State.PREFILLING, PrefillAnswered): Life._prefill_done_before_binding,
    (State.PREFILLING, PrefillRejected): Life._prefill_rejected,
    (State.PREFILLING, PrefillFailed): Life._prefill_failed,
    (State.BOTH, HandedOver): Life._all_has_arrived,
    (State.BOTH, PrefillAnswered): Life._prefill_done_after_binding,
    (State.BOTH, PrefillRejected): Life._prefill_rejected,
    (State.BOTH, PrefillFailed): Life._prefill_failed,
    (State.BOTH, DecodeAnswered): Life._decode_answered,
    (State.BOTH, DecodeFailed): Life._decode_failed,
    (State.DECODING, HandedOver): Life._all_has_arrived,
    (State.DECODING, DecodeBehind): Life._decode_is_behind,
    (State.DECODING, DecodeAnswered): Life._decode_answered,
    (State.DECODING, DecodeFailed): Life._decode_failed,
}
