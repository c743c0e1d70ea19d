"""All engines of one router: who is there, who may be chosen, and what is in flight where. No I/O and no clock.

For the event loop's thread. To choose an engine changes nothing; `enter` counts a leg that starts there, `report` says
what it proved, `leave` counts one that has ended.
"""

from collections.abc import Callable, Collection

import msgspec

from kvberth.router.breaker import BreakerState, Outcome
from kvberth.router.choice import (
    DECODE_POLICIES,
    PREFILL_POLICIES,
    BindingChoice,
    Choice,
    DecodePolicy,
    Policy,
    PrefillPolicy,
    RequestFacts,
    choose_binding,
    has_room,
    missing_tokens,
)
from kvberth.router.engines import Engine, Role, Source
from kvberth.router.load import Held

__all__ = ["Fleet", "RequestEngines", "Visit"]


class Visit(msgspec.Struct, frozen=True, eq=False):
    """One leg at an engine."""

    engine: Engine
    tokens: int
    started_at: float
    is_probe: bool


class Fleet:
    """The engines by URL. `on_forgotten` hears of an engine that is no longer known, `on_breaker` of a breaker that has
    changed its state.
    """

    def __init__(
        self,
        *,
        prefill_policy: PrefillPolicy = PrefillPolicy.QUEUE,
        decode_policy: DecodePolicy = DecodePolicy.FREE_KV,
        affinity_seconds: float = 0.5,
        local_prefill_tokens: int = 0,
        on_forgotten: Callable[[Engine], None] | None = None,
        on_breaker: Callable[[Engine], None] | None = None,
    ) -> None:
        self._engines: dict[str, Engine] = {}
        self._prefill_policy = PREFILL_POLICIES[prefill_policy]
        self._decode_policy = DECODE_POLICIES[decode_policy]
        self._affinity_seconds = affinity_seconds
        self._local_prefill_tokens = local_prefill_tokens
        self._on_forgotten = on_forgotten
        self._on_breaker = on_breaker
        self._turn = 0

    @property
    def engines(self) -> list[Engine]:
        return list(self._engines.values())

    @property
    def prefill(self) -> list[Engine]:
        return self.in_role(Role.PREFILL)

    @property
    def decode(self) -> list[Engine]:
        return self.in_role(Role.DECODE)

    def in_role(self, role: Role | None) -> list[Engine]:
        """The engines in a role; None are those that have not said theirs yet."""
        return [engine for engine in self._engines.values() if engine.role is role]

    def find(self, url: str) -> Engine | None:
        return self._engines.get(url)

    def add(self, url: str, asserted_role: Role | None, source: Source) -> Engine:
        """A new engine. Raises `ValueError` if there is one behind this URL."""
        if url in self._engines:
            raise ValueError(f"{url} is known already")
        engine = Engine(url, asserted_role, asserted_role=asserted_role, source=source)
        self._engines[url] = engine
        return engine

    def remove(self, engine: Engine) -> None:
        """Send nothing there any more, and forget it when its last request has ended."""
        engine.is_draining = True
        engine.is_leaving = True
        self._forget_if_done(engine)

    def keep(self, engine: Engine) -> None:
        """Take back a `remove` whose engine is still there."""
        if engine.is_leaving:
            engine.is_leaving = False
            engine.is_draining = False

    def for_request(self, facts: RequestFacts, clock: Callable[[], float]) -> "RequestEngines":
        """The choice as one request sees it."""
        return RequestEngines(self, facts, clock)

    def choose_prefill(self, facts: RequestFacts, now: float, excluded: Collection[Engine] = ()) -> Choice | None:
        return self._choose(self.prefill, self._prefill_policy, facts, now, excluded)

    def choose_decode(self, facts: RequestFacts, now: float, excluded: Collection[Engine] = ()) -> Choice | None:
        return self._choose(self.decode, self._decode_policy, facts, now, excluded)

    def choose_decode_with_room(
        self, facts: RequestFacts, now: float, excluded: Collection[Engine] = ()
    ) -> Choice | None:
        """A decode worker that is known to have room for the prompt."""
        roomy = [engine for engine in self.decode if has_room(engine, facts)]
        return self._choose(roomy, self._decode_policy, facts, now, excluded)

    def choose_binding(self, prefill: Engine, facts: RequestFacts, now: float) -> BindingChoice:
        """When to choose the decode worker of a prompt that this prefill worker gets."""
        return choose_binding(prefill, [engine for engine in self.decode if engine.is_available(now)], facts)

    def lacks_little(self, decode: Engine, facts: RequestFacts) -> bool:
        """Whether this decode worker had better compute the prompt itself than wait for somebody else."""
        limit = self._local_prefill_tokens
        return limit > 0 and missing_tokens(decode, facts) < limit

    def enter(self, engine: Engine, facts: RequestFacts, now: float) -> Visit:
        """A leg of a request starts at an engine."""
        self._turn += 1
        engine.last_turn = self._turn
        engine.held = Held(engine.held.requests + 1, engine.held.tokens + facts.prompt_tokens)
        engine.prefixes.remember(facts.prefixes, facts.prompt_tokens, engine.remembered_tokens)
        before = engine.breaker.state
        visit = Visit(engine, facts.prompt_tokens, now, engine.breaker.enter(now))
        self._tell_breaker(engine, before)
        return visit

    def report(self, visit: Visit, outcome: Outcome, now: float) -> None:
        """What a leg has proved of its engine; once per leg."""
        before = visit.engine.breaker.state
        visit.engine.breaker.report(outcome, now, is_probe=visit.is_probe)
        self._tell_breaker(visit.engine, before)

    def prefilled(self, visit: Visit, now: float) -> None:
        """A leg has computed its prompt: the engine's rate is measured with it."""
        visit.engine.rate.add(visit.tokens, started_at=visit.started_at, ended_at=now)

    def leave(self, visit: Visit) -> None:
        """A leg has left its engine; once per leg."""
        held = visit.engine.held
        visit.engine.held = Held(held.requests - 1, held.tokens - visit.tokens)
        self._forget_if_done(visit.engine)

    def begin_transfer(self, engine: Engine) -> None:
        """A request's KV cache comes from this engine: it is not forgotten before `end_transfer`."""
        engine.transfers += 1

    def end_transfer(self, engine: Engine) -> None:
        engine.transfers -= 1
        self._forget_if_done(engine)

    def _choose(
        self, engines: list[Engine], policy: Policy, facts: RequestFacts, now: float, excluded: Collection[Engine]
    ) -> Choice | None:
        candidates = [engine for engine in engines if engine.is_available(now) and engine not in excluded]
        return policy(candidates, facts, self._affinity_seconds) if candidates else None

    def _forget_if_done(self, engine: Engine) -> None:
        is_known = self._engines.get(engine.url) is engine
        if engine.is_leaving and is_known and not engine.is_needed:
            del self._engines[engine.url]
            if self._on_forgotten is not None:
                self._on_forgotten(engine)

    def _tell_breaker(self, engine: Engine, before: BreakerState) -> None:
        if self._on_breaker is not None and engine.breaker.state is not before:
            self._on_breaker(engine)


class RequestEngines:
    """The fleet as one request sees it: what is known of the request and of the time is filled in."""

    def __init__(self, fleet: Fleet, facts: RequestFacts, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._facts = facts
        self._clock = clock

    def choose_prefill(self, excluded: Collection[Engine] = ()) -> Choice | None:
        return self._fleet.choose_prefill(self._facts, self._clock(), excluded)

    def choose_decode(self, excluded: Collection[Engine] = ()) -> Choice | None:
        return self._fleet.choose_decode(self._facts, self._clock(), excluded)

    def choose_decode_with_room(self, excluded: Collection[Engine] = ()) -> Choice | None:
        return self._fleet.choose_decode_with_room(self._facts, self._clock(), excluded)

    def choose_binding(self, prefill: Engine) -> BindingChoice:
        return self._fleet.choose_binding(prefill, self._facts, self._clock())

    def lacks_little(self, decode: Engine) -> bool:
        return self._fleet.lacks_little(decode, self._facts)
