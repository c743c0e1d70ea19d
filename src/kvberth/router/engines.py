"""What the router knows of one engine. No I/O: `watch.py` keeps what is said here true.

An engine tells its role and its control address itself, in the `kvberth:engine_info` line of vLLM's own `/metrics`, so
one URL per engine is all that a person configures.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from kvberth.router.binding import Pace
from kvberth.router.breaker import Breaker
from kvberth.router.load import EngineLoad, Held, OwnPrompts, PrefillRate, samples_of
from kvberth.router.prefix import PrefixMemory

__all__ = ["Engine", "EngineInfo", "Role", "Source", "engine_url", "parse_engine_info"]

_INFO_METRIC = "kvberth:engine_info"
# Offloaded to the host's memory or to disks, KV caches may be as much more than what an engine says that it holds.
_REMEMBERED_CACHES = 8


class Role(StrEnum):
    """vLLM's `kv_role`."""

    PREFILL = "kv_producer"
    DECODE = "kv_consumer"

    @property
    def word(self) -> str:
        """`prefill` or `decode`: what people write."""
        return self.name.lower()


class Source(StrEnum):
    """Who named an engine: what the engines file no longer names goes only if it came from there."""

    SETTINGS = "settings"
    FILE = "file"
    API = "api"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself; the control address is where a prefill worker takes registrations.

    `public_key` is empty where the control channel is not authenticated.
    `hears_router` is false where another connector listens at that address: vLLM's own ends its listener, and with it
    all its handshakes, at the first message that it does not expect.
    """

    role: Role
    engine_id: str
    control_host: str
    control_port: int
    tp_size: int
    public_key: str = ""
    hears_router: bool = True


@dataclass(slots=True, eq=False)
class Engine:
    """One vLLM server as the router sees it at the moment; `problem` says why it is not ready.

    An engine is ready once it is healthy and has said who it is. What it said is forgotten with its readiness: behind
    the same URL a restarted engine is another engine. `role` is the last that is known, `asserted_role` what a person
    said that it must be. A draining engine gets nothing new; a leaving one is forgotten with its last request.
    `transfers` counts the requests whose KV cache comes from there and has not all arrived, as far as is known: a
    prefill worker that has answered is needed still. `heard_at` is when anything last came from there, a piece of an
    answer or a sign of health; `on_silent` is who wants to know that nothing does, by whatever each calls itself.
    """

    url: str
    role: Role | None = None
    info: EngineInfo | None = None
    problem: str | None = "not heard from yet"
    asserted_role: Role | None = None
    source: Source = Source.SETTINGS
    is_draining: bool = False
    is_leaving: bool = False
    held: Held = field(default_factory=Held)
    transfers: int = 0
    load: EngineLoad | None = None
    last_turn: int = 0
    breaker: Breaker = field(default_factory=Breaker)
    rate: PrefillRate = field(default_factory=PrefillRate)
    own_prompts: OwnPrompts = field(default_factory=OwnPrompts)
    prefixes: PrefixMemory = field(default_factory=PrefixMemory)
    heard_at: float = 0.0
    on_unready: Callable[[], None] | None = None
    on_silent: dict[object, Callable[[], None]] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    _last_engine_id: str | None = None

    @property
    def is_ready(self) -> bool:
        return self.info is not None

    @property
    def in_flight(self) -> int:
        """Requests that this router has there."""
        return self.held.requests

    @property
    def other_requests(self) -> int:
        """Requests that the last reading showed and that are not this router's."""
        return max(0, self.load.running + self.load.waiting - self.load.held.requests) if self.load else 0

    @property
    def requests(self) -> int:
        """All requests there, as far as is known."""
        return self.held.requests + self.other_requests

    @property
    def free_kv_tokens(self) -> float | None:
        """What the last reading showed as free, less what has been sent there since; None without a reading."""
        if self.load is None or self.load.kv_capacity_tokens is None:
            return None
        return self.load.kv_capacity_tokens * (1 - self.load.kv_usage) - (self.held.tokens - self.load.held.tokens)

    @property
    def kv_capacity_tokens(self) -> int:
        """What its KV cache holds, by the last reading; 0 where that is not known."""
        return self.load.kv_capacity_tokens or 0 if self.load else 0

    @property
    def remembered_tokens(self) -> float:
        """How many tokens ago a prompt may have come whose KV cache it may have still, offloaded ones among them."""
        return _REMEMBERED_CACHES * self.kv_capacity_tokens or math.inf

    @property
    def is_needed(self) -> bool:
        """Whether stopping it would cost a request of this router."""
        return self.held.requests > 0 or self.transfers > 0

    def is_available(self, now: float) -> bool:
        """Whether a new leg may be sent there."""
        return self.is_ready and not self.is_draining and self.breaker.allows(now)

    def mark_ready(self, info: EngineInfo) -> None:
        """The engine is well and says who it is. What was learnt of another one behind this URL is forgotten."""
        if self._last_engine_id not in (None, info.engine_id):
            self.breaker = Breaker()
            self.rate = PrefillRate()
            self.own_prompts = OwnPrompts()
            self.prefixes = PrefixMemory()
            self.load = None
            self.pace = Pace()
        self._last_engine_id = info.engine_id
        self.role = info.role
        self.info = info
        self.problem = None

    def take_load(self, load: EngineLoad) -> None:
        """A new reading."""
        self.load = load
        self.own_prompts.add(load)

    def mark_unready(self, problem: str) -> None:
        """Take the engine out until the watch finds it well; whoever set `on_unready` is told."""
        self.info = None
        self.load = None
        self.problem = problem
        if self.on_unready is not None:
            self.on_unready()

    def mark_silent(self, problem: str) -> None:
        """It answers nobody, though its connections stand: whoever waits for it need not wait longer."""
        self.mark_unready(problem)
        for tell in list(self.on_silent.values()):
            tell()


def engine_url(text: str) -> str:
    """An engine's base URL without a slash at its end. Raises `ValueError` with one line."""
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ValueError(f"{text!r} is no engine URL, expected something like http://127.0.0.1:8001")
    if "@" in parts.netloc:
        raise ValueError("an engine's URL has no user and password; its key is the setting engine_api_key")
    return text.rstrip("/")


def parse_engine_info(metrics_text: str, expected: Role | None = None) -> EngineInfo:
    """Find what an engine says of itself in the text of its `/metrics`.

    Raises `ValueError`, written for operators, where the line is absent or broken, or the role is not `expected`.
    """
    labels_by_engine = {
        sample.labels.get("engine_id"): sample.labels for sample in samples_of(metrics_text, [_INFO_METRIC])
    }
    if not labels_by_engine:
        raise ValueError(f"/metrics has no {_INFO_METRIC}: is the engine started with KVBerthConnector?")
    if len(labels_by_engine) > 1:
        raise ValueError(f"/metrics names {len(labels_by_engine)} engines: one URL per engine is needed")
    (labels,) = labels_by_engine.values()
    try:
        role = _role(labels["role"], expected)
        is_prefill = role is Role.PREFILL
        return EngineInfo(
            role=role,
            engine_id=labels["engine_id"],
            control_host=labels["control_host"] if is_prefill else "",
            control_port=int(labels["control_port"]) if is_prefill else 0,
            tp_size=int(labels["tp_size"]),
            public_key=labels.get("control_public_key", "") if is_prefill else "",
            hears_router="protocol_version" in labels,
        )
    except KeyError as error:
        raise ValueError(f"{_INFO_METRIC} has no label {error}") from error


def _role(said: str, expected: Role | None) -> Role:
    if expected is not None and said != expected:
        raise ValueError(f"is a {said}, but is configured as a {expected} ({expected.word})")
    if said not in list(Role):
        raise ValueError(f"is a {said}, but must be one of {', '.join(Role)}")
    return Role(said)
