"""A timeline as spans of a trace: what there was, from when to when, and how it ended. Pure; `otel.py` makes them real.

    POST /v1/completions   --------------------------------------
      queue                ------
      prefill (a leg)        ------------
      bind                        ----
      transfer                           --
      decode (a leg)              -------------------------------

Legs are the requests to engines, in the order in which they were sent; an engine's own spans are below them.
"""

from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from kvberth.router.figures import is_broken, queue, time_to_first_token
from kvberth.router.timeline import Event, Fact, Timeline, What

__all__ = ["Span", "children", "root", "root_attributes"]

# The GenAI conventions' words for what an endpoint does. vLLM is not among the systems that they list.
_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}
# What is part of the whole request and of no span below it.
_OF_ROOT = (What.RETRIED, What.LEFT_UNDIVIDED, What.CONTINUED)
# What ends a leg in good order. A prefill leg is also ended by an answer that has come without it, and either leg by
# another one that takes its place: it has been aborted then.
_GOOD_ENDS = {"prefill": (What.PREFILL_DONE,), "decode": (What.ENDED,)}
_BAD_ENDS = {
    "prefill": (What.PREFILL_SENT, What.FIRST_TOKEN, What.ENDED),
    "decode": (What.PREFILL_SENT, What.DECODE_SENT),
}


@dataclass(frozen=True, slots=True)
class Span:
    """`begin` and `end` are in seconds since the request's arrival, as its events are.

    `error` is a word for why it failed, `description` says it to people.
    """

    name: str
    begin: float
    end: float
    attributes: dict[str, Fact] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    error: str | None = None
    description: str = ""
    is_leg: bool = False


def root_attributes(timeline: Timeline) -> dict[str, Fact]:
    """What is known at the arrival, and may decide whether the request is traced at all."""
    known: dict[str, Fact] = {
        "http.request.method": timeline.method,
        "http.route": timeline.endpoint,
        "kvberth.request_id": timeline.request_id,
    }
    if operation := _OPERATIONS.get(timeline.endpoint):
        known |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "vllm"}
    return known


def root(timeline: Timeline) -> Span:
    """The whole of a request that has ended; it has failed where that is not the client's doing."""
    attributes: dict[str, Fact | None] = {
        "http.response.status_code": timeline.status,
        "gen_ai.usage.output_tokens": timeline.output_tokens,
        "gen_ai.response.time_to_first_chunk": time_to_first_token(timeline),
        "kvberth.mode": timeline.mode or None,
        "kvberth.path": timeline.path,
    }
    for event in timeline.events:
        if event.what is What.ADMITTED:
            attributes["gen_ai.request.model"] = event.facts["model"] or None
            attributes["gen_ai.request.stream"] = event.facts["streamed"]
        elif event.what is What.BINDING_CHOSEN:
            attributes["kvberth.binding"] = event.facts["binding"]
            attributes["kvberth.binding.reason"] = event.facts["reason"]
    status = timeline.status or 0
    is_failed = not timeline.is_abandoned and (status >= 500 or is_broken(timeline))
    error = timeline.error or (str(status) if status >= 400 else None)
    return Span(
        f"{timeline.method} {timeline.endpoint}",
        0.0,
        timeline.first(What.ENDED) or 0.0,
        {name: value for name, value in (attributes | {"error.type": error}).items() if value is not None},
        tuple(event for event in timeline.events if event.what in _OF_ROOT),
        error if is_failed else None,
    )


def children(timeline: Timeline) -> list[Span]:
    """What a request that has ended consisted of; the legs among them in the order in which they were sent."""
    walk = _Walk(timeline)
    for event in timeline.events:
        walk.take(event)
    return walk.spans


class _Walk:
    """Goes through the events once: legs are opened and closed, and what lies between two events is a span.

    `_open` are places in `spans`.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.spans: list[Span] = []
        self._timeline = timeline
        self._open: dict[str, int] = {}
        self._transfer_id: Fact | None = None
        self._prefilled_at: float | None = None
        queued = queue(timeline)
        if queued is not None:
            self.spans.append(Span("queue", 0.0, queued))

    def take(self, event: Event) -> None:
        for leg in list(self._open):
            self._close(leg, event)
        match event.what:
            case What.PREFILL_SENT:
                self._transfer_id, self._prefilled_at = event.facts["transfer_id"], None
                self._send("prefill", event)
            case What.LEFT_UNDIVIDED:
                self._transfer_id = None
            case What.DECODE_SENT:
                self._send("decode", event)
            case What.PREFILL_BEGAN:
                self._happen("prefill", event)
            case What.FIRST_TOKEN:
                self._happen("decode", event)
            case What.PREFILL_DONE:
                self._prefilled_at = event.at
            case What.REGISTERED if "decode" in self._open:
                self._span("bind", self.spans[self._open["decode"]].begin, event.at)
            case What.TRANSFERRED if self._prefilled_at is not None:
                self._span("transfer", self._prefilled_at, event.at)

    def _send(self, leg: str, event: Event) -> None:
        engine = urlsplit(str(event.facts["engine"]))
        name = "relay" if self._timeline.path == "relayed" else leg
        attributes = {
            "server.address": engine.hostname,
            "server.port": engine.port,
            "kvberth.engine.reason": event.facts.get("reason"),
            "kvberth.transfer_id": self._transfer_id,
            "kvberth.attempt": event.facts.get("attempt") if self._transfer_id is not None else None,
        }
        known = {key: value for key, value in attributes.items() if value is not None}
        self._open[leg] = len(self.spans)
        self.spans.append(Span(name, event.at, event.at, known, is_leg=True))

    def _happen(self, leg: str, event: Event) -> None:
        if (place := self._open.get(leg)) is not None:
            span = self.spans[place]
            self.spans[place] = replace(span, events=(*span.events, event))

    def _close(self, leg: str, event: Event) -> None:
        """If this is its end."""
        if event.what is What.LEG_FAILED and event.facts["leg"] == leg:
            kind = str(event.facts["kind"])
            self._end(leg, event, error=kind, description=str(event.facts["detail"]))
        elif event.what in _GOOD_ENDS[leg]:
            self._end(leg, event, is_aborted=self._timeline.is_abandoned and event.what is What.ENDED)
        elif event.what in _BAD_ENDS[leg]:
            self._end(leg, event, is_aborted=True)

    def _end(
        self, leg: str, event: Event, *, error: str | None = None, description: str = "", is_aborted: bool = False
    ) -> None:
        place = self._open.pop(leg)
        span = self.spans[place]
        if error is not None:
            span = replace(span, attributes=span.attributes | {"error.type": error})
        if is_aborted:
            span = replace(span, attributes=span.attributes | {"kvberth.aborted": True})
        self.spans[place] = replace(span, end=event.at, error=error, description=description)

    def _span(self, name: str, begin: float, end: float) -> None:
        known = {} if self._transfer_id is None else {"kvberth.transfer_id": self._transfer_id}
        self.spans.append(Span(name, begin, end, known))
