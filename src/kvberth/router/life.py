"""One request's life up to the moment its answer is settled: events in, actions out. No I/O and no clock.

    bound early          begin -> BOTH -------------------- P answered -> DECODING -- D answered --> SETTLED
    bound just in time   begin -> PREFILLING -- now -> BOTH -- P answered -> DECODING -- D answered --> SETTLED
    bound late, and pull begin -> PREFILLING -------------- P answered -> DECODING -- D answered --> SETTLED
    undivided            begin ----------------------------------------> DECODING -- D answered --> SETTLED

Until the client has seen a byte, a failure can be hidden: a failed prefill leg is tried once more on another engine and
then the request is served undivided; a failed decode leg starts a new transfer, with both legs anew, on another decode
worker. Once each, because a request that kills engines must not be shown to all of them.

After SETTLED only bytes flow. The caller ends a leg that is still running when the answer is complete.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from kvberth.router.answer import Answer
from kvberth.router.binding import Binding
from kvberth.router.choice import Choice
from kvberth.router.config import Mode
from kvberth.router.engines import Engine, EngineInfo
from kvberth.router.errors import Failure, Leg, RouterError
from kvberth.router.transfer import decode_params, prefill_params

__all__ = [
    "AbortDecode",
    "AbortPrefill",
    "Action",
    "AwaitMoment",
    "BindNow",
    "DecodeAnswered",
    "DecodeFailed",
    "Deliver",
    "Engines",
    "Event",
    "Life",
    "PrefillAnswered",
    "PrefillFailed",
    "PrefillRejected",
    "Refuse",
    "Retry",
    "StartDecode",
    "StartPrefill",
    "State",
]

_UNDIVIDED = "undivided"


class State(Enum):
    NEW = auto()
    PREFILLING = auto()
    BOTH = auto()
    DECODING = auto()
    SETTLED = auto()


@dataclass(frozen=True, slots=True)
class PrefillAnswered:
    """P is done. `transfer_params` is what its connector answered, if it did."""

    transfer_params: bytes | None


@dataclass(frozen=True, slots=True)
class PrefillRejected:
    """P found a mistake of the client's (4xx): D would find the same."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    failure: Failure


@dataclass(frozen=True, slots=True)
class DecodeAnswered:
    """D's first bytes are here, or all of them, or its error."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """D brought nothing that a client could be shown."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class BindNow:
    """P will soon be done: the moment to choose D has come."""


Event = BindNow | PrefillAnswered | PrefillRejected | PrefillFailed | DecodeAnswered | DecodeFailed


@dataclass(frozen=True, slots=True)
class StartPrefill:
    engine: Engine
    transfer_id: str
    transfer_params: bytes


@dataclass(frozen=True, slots=True)
class AwaitMoment:
    """Watch the prefill and say `BindNow` in time."""

    engine: Engine
    transfer_id: str


@dataclass(frozen=True, slots=True)
class StartDecode:
    """`transfer_params` is None where D computes the prompt itself."""

    engine: Engine
    transfer_params: bytes | None


@dataclass(frozen=True, slots=True)
class AbortPrefill:
    pass


@dataclass(frozen=True, slots=True)
class AbortDecode:
    pass


@dataclass(frozen=True, slots=True)
class Retry:
    """A failure is being hidden from the client; operators want to know."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Deliver:
    answer: Answer


@dataclass(frozen=True, slots=True)
class Refuse:
    error: RouterError


Action = StartPrefill | AwaitMoment | StartDecode | AbortPrefill | AbortDecode | Retry | Deliver | Refuse


class Engines(Protocol):
    """Who is there to choose from; `Fleet.for_request` in service."""

    def choose_prefill(self, excluded: Collection[Engine] = ()) -> Choice | None: ...
    def choose_decode(self, excluded: Collection[Engine] = ()) -> Choice | None: ...


class Life:
    """Decides what happens next for one request. `obstacle` is why it cannot be split, or None."""

    def __init__(
        self,
        engines: Engines,
        *,
        mode: Mode,
        binding: Binding = Binding.EARLY,
        obstacle: str | None,
        num_consumers: int,
        new_transfer_id: Callable[[], str],
    ) -> None:
        self.state = State.NEW
        self.undivided_reason = obstacle
        self._engines = engines
        self._mode = mode
        self.binding = Binding.LATE if mode is Mode.PULL else binding
        self._transfer_id = ""
        self._num_consumers = num_consumers
        self._new_transfer_id = new_transfer_id
        self._failed_prefills: list[Engine] = []
        self._failed_decodes: list[Engine] = []
        self._prefill: Engine | None = None
        self._decode: Engine | None = None

    @property
    def path(self) -> str:
        """How the prompt's KV comes to D: `push`, `pull` or `undivided`."""
        return _UNDIVIDED if self.undivided_reason else self._mode.value

    @property
    def awaited_leg(self) -> Leg:
        """The leg that holds the answer up."""
        return "prefill" if self.state in (State.PREFILLING, State.BOTH) else "decode"

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
        decode_choice = self._engines.choose_decode(self._failed_decodes)
        if decode_choice is None:
            return self._settle(Refuse(_no_decode_worker()))
        decode = decode_choice.engine
        if self.undivided_reason:
            return self._start_undivided(decode)
        prefill_choice = self._engines.choose_prefill(self._failed_prefills)
        prefill = prefill_choice.engine if prefill_choice else None
        if prefill is None or prefill.info is None:
            self.undivided_reason = "prefill_failed" if self._failed_prefills else "no_prefill_ready"
            return self._start_undivided(decode)
        self._transfer_id = transfer_id = self._new_transfer_id()
        self._prefill = prefill
        to_prefill = prefill_params(transfer_id, num_consumers=self._num_consumers, mode=self._mode)
        start = StartPrefill(prefill, transfer_id, to_prefill)
        self.state = State.PREFILLING
        match self.binding:
            # D is chosen on load that is fresh then; that one is there at all was asked above.
            case Binding.LATE:
                return [start]
            case Binding.JIT:
                return [start, AwaitMoment(prefill, transfer_id)]
            case Binding.EARLY:
                return [start, self._bind(decode, prefill.info)]

    def _bind(self, decode: Engine, producer: EngineInfo) -> StartDecode:
        """D registers while P computes."""
        self.state = State.BOTH
        self._decode = decode
        return StartDecode(
            decode, decode_params(self._transfer_id, num_consumers=self._num_consumers, producer=producer)
        )

    def _moment_has_come(self, _event: BindNow) -> list[Action]:
        choice = self._engines.choose_decode(self._failed_decodes)
        if choice is None:
            return self._settle(AbortPrefill(), Refuse(_no_decode_worker()))
        if self._prefill is None or self._prefill.info is None:
            return []  # it has just gone; its leg says so next
        return [self._bind(choice.engine, self._prefill.info)]

    def _start_undivided(self, decode: Engine) -> list[Action]:
        self.state = State.DECODING
        self._decode = decode
        return [StartDecode(decode, None)]

    def _prefill_done_after_binding(self, _event: PrefillAnswered) -> list[Action]:
        self.state = State.DECODING
        return []

    def _prefill_done_before_binding(self, event: PrefillAnswered) -> list[Action]:
        choice = self._engines.choose_decode(self._failed_decodes)
        if choice is None:
            return self._settle(Refuse(_no_decode_worker()))
        decode = choice.engine
        if event.transfer_params is None:
            self.undivided_reason = "no_transfer_params"
            return self._start_undivided(decode)
        self.state = State.DECODING
        self._decode = decode
        return [StartDecode(decode, event.transfer_params)]

    def _prefill_rejected(self, event: PrefillRejected) -> list[Action]:
        return self._settle(*self._abort_decode(), Deliver(event.answer))

    def _prefill_failed(self, event: PrefillFailed) -> list[Action]:
        aborts = self._abort_decode()
        if not event.failure.is_worth_another_engine:
            return self._settle(*aborts, Refuse(event.failure.as_error()))
        if self._failed_prefills:
            self.undivided_reason = "prefill_failed"
        if self._prefill is not None:
            self._failed_prefills.append(self._prefill)
        return [*aborts, Retry(event.failure), *self._start_transfer()]

    def _decode_answered(self, event: DecodeAnswered) -> list[Action]:
        return self._settle(Deliver(event.answer))

    def _decode_failed(self, event: DecodeFailed) -> list[Action]:
        aborts: list[Action] = [AbortPrefill()] if self.state is State.BOTH else []
        has_been_tried_again = bool(self._failed_decodes)
        if self._decode is not None:
            self._failed_decodes.append(self._decode)
        is_last = (
            has_been_tried_again
            or not event.failure.is_worth_another_engine
            or self._engines.choose_decode(self._failed_decodes) is None
        )
        if is_last:
            return self._settle(*aborts, Refuse(event.failure.as_error()))
        return [*aborts, Retry(event.failure), *self._start_transfer()]

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
    (State.PREFILLING, PrefillAnswered): Life._prefill_done_before_binding,
    (State.PREFILLING, PrefillRejected): Life._prefill_rejected,
    (State.PREFILLING, PrefillFailed): Life._prefill_failed,
    (State.BOTH, PrefillAnswered): Life._prefill_done_after_binding,
    (State.BOTH, PrefillRejected): Life._prefill_rejected,
    (State.BOTH, PrefillFailed): Life._prefill_failed,
    (State.BOTH, DecodeAnswered): Life._decode_answered,
    (State.BOTH, DecodeFailed): Life._decode_failed,
    (State.DECODING, DecodeAnswered): Life._decode_answered,
    (State.DECODING, DecodeFailed): Life._decode_failed,
}
