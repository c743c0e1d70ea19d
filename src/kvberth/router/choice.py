"""The choice of one engine among those that may be chosen: one pure function per policy.

A policy gets at least one candidate and gives the one that it prefers, with a short reason for people. The candidates'
own figures are what `watch.py` read last and what this router has sent there since (see `Engine`).
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

import msgspec

from kvberth.router.binding import Binding
from kvberth.router.engines import Engine
from kvberth.router.prefix import matched_bytes

__all__ = [
    "DECODE_POLICIES",
    "PREFILL_POLICIES",
    "BindingChoice",
    "Choice",
    "DecodePolicy",
    "Policy",
    "PrefillPolicy",
    "RequestFacts",
    "choose_binding",
    "free_kv",
    "has_room",
    "least_loaded",
    "missing_tokens",
    "queue",
    "round_robin",
]

# Shares of an engine's KV cache. Closer than the first, free memory says nothing and requests decide; up to the second
# a prefix that need not be sent again is worth more than memory that nobody needs yet.
_SAME_SHARE = 0.01
_AFFINITY_SHARE = 0.1
# Of an engine's KV cache: what it has seen within that many tokens it has still. The rest is for the answers' tokens.
_HELD_SHARE = 0.5
# A choice that is so old is as good as a fresh one: decode workers' loads change with requests that take seconds.
_SOON_SECONDS = 0.1
# A decode worker that computes more of prompts itself than this makes its streams wait for them.
_OWN_PROMPT_TOKENS_PER_SECOND = 1024


class PrefillPolicy(StrEnum):
    QUEUE = "queue"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"


class DecodePolicy(StrEnum):
    FREE_KV = "free-kv"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"


class RequestFacts(msgspec.Struct, frozen=True):
    """What a policy knows of a request: the size of its prompt, and digests of the prompt's beginnings."""

    prompt_tokens: int = 0
    prefixes: tuple[int, ...] = ()
    prompt_bytes: int = 0


class Choice(msgspec.Struct, frozen=True):
    engine: Engine
    reason: str


class BindingChoice(msgspec.Struct, frozen=True):
    binding: Binding
    reason: str


Policy = Callable[[Sequence[Engine], RequestFacts, float], Choice]


def round_robin(candidates: Sequence[Engine], _facts: RequestFacts, _affinity_seconds: float) -> Choice:
    """The engine whose turn is longest ago."""
    return Choice(min(candidates, key=lambda engine: engine.last_turn), "its turn")


def least_loaded(candidates: Sequence[Engine], _facts: RequestFacts, _affinity_seconds: float) -> Choice:
    """The engine with the fewest of this router's requests in flight; among equals, whose turn is longest ago."""
    engine = min(candidates, key=lambda engine: (engine.in_flight, engine.last_turn))
    return Choice(engine, f"fewest in flight, {engine.in_flight}")


def queue(candidates: Sequence[Engine], facts: RequestFacts, affinity_seconds: float) -> Choice:
    """The engine whose queue of prompt tokens is expected to be computed first.

    One that has seen the prompt's beginning is preferred if its queue is at most `affinity_seconds` longer. Until an
    engine's rate is measured, it is taken to be as fast as the others; without any rate, requests are counted.
    """
    rates = [rate for engine in candidates if (rate := engine.rate.tokens_per_second)]
    if not rates:
        fewest = min(engine.requests for engine in candidates)
        equals = [engine for engine in candidates if engine.requests == fewest]
        return _familiar_or_next(equals, facts, f"fewest requests, {fewest}")
    usual_rate = sum(rates) / len(rates)
    waits = {
        engine: _tokens_ahead(engine, facts) / (engine.rate.tokens_per_second or usual_rate) for engine in candidates
    }
    shortest = min(waits.values())
    near = [engine for engine in candidates if waits[engine] <= shortest + affinity_seconds]
    if familiar := _most_familiar(near, facts, by=waits.__getitem__):
        return Choice(familiar, f"prefix seen, queue {_milliseconds(waits[familiar])}")
    engine = min(candidates, key=lambda engine: (waits[engine], engine.requests, engine.last_turn))
    return Choice(engine, f"shortest queue, {_milliseconds(shortest)}")


def free_kv(candidates: Sequence[Engine], facts: RequestFacts, _affinity_seconds: float) -> Choice:
    """The engine with the most free KV cache; where that is about the same, with the fewest requests.

    One that computes prompts itself is left out, as long as another one has room. One that has seen the prompt's
    beginning is preferred if the prompt has room there and little less is free. Where one engine's free memory is not
    known, it cannot be compared: then the requests in flight decide.
    """
    candidates = _undisturbed(candidates, facts)
    free = {engine: tokens for engine in candidates if (tokens := engine.free_kv_tokens) is not None}
    if len(free) < len(candidates):
        chosen = least_loaded(candidates, facts, 0.0)
        return Choice(chosen.engine, f"{chosen.reason}; free KV not known of all")
    most = max(free.values())

    def nearly_most(share: float) -> list[Engine]:
        return [engine for engine in candidates if free[engine] >= most - share * engine.kv_capacity_tokens]

    roomy = [engine for engine in nearly_most(_AFFINITY_SHARE) if free[engine] >= facts.prompt_tokens]
    if familiar := _most_familiar(roomy, facts, by=lambda engine: -free[engine]):
        return Choice(familiar, f"prefix seen, {free[familiar]:.0f} KV tokens free")
    engine = min(nearly_most(_SAME_SHARE), key=lambda engine: (engine.requests, engine.last_turn))
    return Choice(engine, f"most KV free, {free[engine]:.0f} tokens")


def choose_binding(prefill: Engine, decodes: Sequence[Engine], facts: RequestFacts) -> BindingChoice:
    """When to choose the decode worker, of those that could be chosen now.

    Early costs reserved memory and an old choice, late costs the handoff's time behind the prefill. So: early where the
    choice would not change or its moment could not be told, late where no one has room to reserve, just in time else.
    """
    if len(decodes) < 2:
        return BindingChoice(Binding.EARLY, "one decode worker")
    if prefill.info is not None and not prefill.info.hears_router:
        return BindingChoice(Binding.EARLY, "the prefill worker does not say how far it is")
    free = [tokens for engine in decodes if (tokens := engine.free_kv_tokens) is not None]
    if len(free) == len(decodes) and max(free) < facts.prompt_tokens:
        return BindingChoice(Binding.LATE, "no decode worker has room")
    rate = prefill.rate.tokens_per_second
    if rate is None:
        return BindingChoice(Binding.JIT, "nothing is known of the prefill worker")
    seconds = (_tokens_ahead(prefill, facts) + facts.prompt_tokens) / rate
    if seconds <= _SOON_SECONDS:
        return BindingChoice(Binding.EARLY, f"prefill takes {_milliseconds(seconds)}")
    return BindingChoice(Binding.JIT, f"prefill takes {_milliseconds(seconds)}")


def missing_tokens(engine: Engine, facts: RequestFacts) -> float:
    """How much of a prompt an engine would have to get or to compute, as far as is known."""
    load = engine.load
    if load is None or not load.keeps_prefixes or not load.kv_capacity_tokens or not facts.prompt_bytes:
        return facts.prompt_tokens
    held = matched_bytes(engine.prefixes.match(facts.prefixes, _HELD_SHARE * load.kv_capacity_tokens))
    return facts.prompt_tokens * (1 - held / facts.prompt_bytes)


def has_room(engine: Engine, facts: RequestFacts) -> bool:
    """Whether it is known that a prompt could be reserved memory for at once."""
    free, load = engine.free_kv_tokens, engine.load
    return load is not None and load.waiting == 0 and free is not None and free >= facts.prompt_tokens


PREFILL_POLICIES: Mapping[PrefillPolicy, Policy] = {
    PrefillPolicy.QUEUE: queue,
    PrefillPolicy.LEAST_LOADED: least_loaded,
    PrefillPolicy.ROUND_ROBIN: round_robin,
}
DECODE_POLICIES: Mapping[DecodePolicy, Policy] = {
    DecodePolicy.FREE_KV: free_kv,
    DecodePolicy.LEAST_LOADED: least_loaded,
    DecodePolicy.ROUND_ROBIN: round_robin,
}


def _undisturbed(candidates: Sequence[Engine], facts: RequestFacts) -> Sequence[Engine]:
    """Those that compute no prompts, or hardly any; all, if none of those has room."""
    undisturbed = [
        engine for engine in candidates if engine.own_prompts.tokens_per_second < _OWN_PROMPT_TOKENS_PER_SECOND
    ]
    has_place = any((free := engine.free_kv_tokens) is None or free >= facts.prompt_tokens for engine in undisturbed)
    return undisturbed if has_place else candidates


def _tokens_ahead(engine: Engine, facts: RequestFacts) -> float:
    # How long other routers' prompts are is not known: as long as this engine's usually are.
    return engine.held.tokens + engine.other_requests * (engine.rate.tokens_per_leg or facts.prompt_tokens)


def _familiar_or_next(equals: Sequence[Engine], facts: RequestFacts, reason: str) -> Choice:
    if familiar := _most_familiar(equals, facts, by=lambda engine: engine.last_turn):
        return Choice(familiar, f"prefix seen, {reason}")
    return Choice(min(equals, key=lambda engine: engine.last_turn), reason)


def _most_familiar(engines: Sequence[Engine], facts: RequestFacts, *, by: Callable[[Engine], float]) -> Engine | None:
    """The engine that has seen the longest beginning, among equals the one with the least `by`; None if none has."""
    matches = {engine: engine.prefixes.match(facts.prefixes) for engine in engines}
    seen = [engine for engine in engines if matches[engine]]
    return min(seen, key=lambda engine: (-matches[engine], by(engine)), default=None)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
