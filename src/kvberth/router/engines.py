"""The engines that the router knows, and the choice among them. No I/O: `watch.py` keeps what is said here true.

An engine tells its role and its control address itself, in the `kvberth:engine_info` line of vLLM's own `/metrics`, so
one URL per engine is all that a person configures.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from prometheus_client.parser import text_string_to_metric_families

from kvberth.router.binding import Pace

__all__ = ["Engine", "EngineInfo", "Fleet", "Role", "least_loaded", "parse_engine_info"]

_INFO_METRIC = "kvberth:engine_info"


class Role(StrEnum):
    """vLLM's `kv_role`."""

    PREFILL = "kv_producer"
    DECODE = "kv_consumer"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself; the control address is where a prefill worker takes registrations."""

    role: Role
    engine_id: str
    control_host: str
    control_port: int
    tp_size: int


@dataclass(slots=True, eq=False)
class Engine:
    """One vLLM server as the router sees it at the moment; `problem` says why it is not ready.

    An engine is ready once it is healthy and has said who it is. What it said is forgotten with its readiness: behind
    the same URL a restarted engine is another engine.
    """

    url: str
    role: Role
    info: EngineInfo | None = None
    problem: str | None = "not heard from yet"
    in_flight: int = 0
    last_turn: int = 0
    on_unready: Callable[[], None] | None = None
    pace: Pace = field(default_factory=Pace)

    @property
    def is_ready(self) -> bool:
        return self.info is not None

    def mark_ready(self, info: EngineInfo) -> None:
        self.info = info
        self.problem = None

    def mark_unready(self, problem: str) -> None:
        """Take the engine out until the watch finds it well; whoever set `on_unready` is told."""
        self.info = None
        self.problem = problem
        if self.on_unready is not None:
            self.on_unready()


def parse_engine_info(metrics_text: str, expected: Role) -> EngineInfo:
    """Find what an engine says of itself in the text of its `/metrics`.

    Raises `ValueError`, written for operators, where the line is absent or broken, or the role is not `expected`.
    """
    # vLLM's page has thousands of lines; the full parser sees only ours.
    ours = "".join(f"{line}\n" for line in metrics_text.splitlines() if line.startswith(_INFO_METRIC))
    labels_by_engine = {
        sample.labels.get("engine_id"): sample.labels
        for family in text_string_to_metric_families(ours)
        for sample in family.samples
    }
    if not labels_by_engine:
        raise ValueError(f"/metrics has no {_INFO_METRIC}: is the engine started with KVBerthConnector?")
    if len(labels_by_engine) > 1:
        raise ValueError(f"/metrics names {len(labels_by_engine)} engines: one URL per engine is needed")
    (labels,) = labels_by_engine.values()
    try:
        if labels["role"] != expected:
            raise ValueError(f"is a {labels['role']}, but is configured as a {expected} ({expected.name.lower()})")
        is_prefill = expected is Role.PREFILL
        return EngineInfo(
            role=expected,
            engine_id=labels["engine_id"],
            control_host=labels["control_host"] if is_prefill else "",
            control_port=int(labels["control_port"]) if is_prefill else 0,
            tp_size=int(labels["tp_size"]),
        )
    except KeyError as error:
        raise ValueError(f"{_INFO_METRIC} has no label {error}") from error


def least_loaded(engines: Iterable[Engine]) -> Engine | None:
    """The engine with the fewest requests in flight; among equals, the one whose turn is longest ago."""
    return min(engines, key=lambda engine: (engine.in_flight, engine.last_turn), default=None)


class Fleet:
    """All engines by role, for the event loop's thread.

    To choose an engine changes nothing; `enter` counts a leg that starts there, `leave` one that has ended.
    """

    def __init__(self, prefill_urls: Sequence[str], decode_urls: Sequence[str]) -> None:
        self.prefill = [Engine(url, Role.PREFILL) for url in prefill_urls]
        self.decode = [Engine(url, Role.DECODE) for url in decode_urls]
        self._turn = 0

    @property
    def engines(self) -> list[Engine]:
        return self.prefill + self.decode

    def choose_prefill(self, excluded: Collection[Engine] = ()) -> Engine | None:
        return least_loaded(_ready(self.prefill, excluded))

    def choose_decode(self, excluded: Collection[Engine] = ()) -> Engine | None:
        return least_loaded(_ready(self.decode, excluded))

    def enter(self, engine: Engine) -> None:
        self._turn += 1
        engine.last_turn = self._turn
        engine.in_flight += 1

    def leave(self, engine: Engine) -> None:
        engine.in_flight -= 1


def _ready(engines: Iterable[Engine], excluded: Collection[Engine]) -> list[Engine]:
    return [engine for engine in engines if engine.is_ready and engine not in excluded]
