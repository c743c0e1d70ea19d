"""What a timeline says in figures: for metrics and for traces. Pure functions of a request that has ended.

A figure is in seconds, and None where the request did not come so far or nobody has told the router.
"""

from kvberth.router.timeline import Event, Timeline, What

__all__ = [
    "bind",
    "end_to_end",
    "is_broken",
    "last_phase",
    "prefill",
    "queue",
    "retries",
    "time_per_output_token",
    "time_to_first_token",
    "transfer",
    "undivided_reason",
]


def time_to_first_token(timeline: Timeline) -> float | None:
    """From the arrival to the first chunk of a stream."""
    return timeline.first(What.FIRST_TOKEN)


def time_per_output_token(timeline: Timeline) -> float | None:
    """(E2E - TTFT) / (output tokens - 1), as in `vllm bench serve`; of streams that came to their end."""
    first, last, tokens = timeline.first(What.FIRST_TOKEN), timeline.last_token_at, timeline.output_tokens
    if not timeline.is_answered or first is None or last is None or tokens is None or tokens < 2:
        return None
    return (last - first) / (tokens - 1)


def end_to_end(timeline: Timeline) -> float | None:
    """From the arrival to the last chunk of a stream, or to the end of an answer in one piece."""
    if not timeline.is_answered:
        return None
    return timeline.first(What.ENDED) if timeline.last_token_at is None else timeline.last_token_at


def queue(timeline: Timeline) -> float | None:
    """From the arrival to the prompt's first step, or where that is not known to the first leg."""
    return timeline.queued_until


def prefill(timeline: Timeline) -> float | None:
    """From the prompt's first step, or where that is not known from the leg's start, to the last step's end."""
    events = _last_transfer(timeline)
    sent, done = _first(events, What.PREFILL_SENT), _first(events, What.PREFILL_DONE)
    began = _first(events, What.PREFILL_BEGAN)
    return _between(sent if began is None else began, done)


def bind(timeline: Timeline) -> float | None:
    """From the moment that a decode worker is sent the request to its registration."""
    sent = None
    for event in _last_transfer(timeline):
        if event.what is What.DECODE_SENT:
            sent = event.at
        elif event.what is What.REGISTERED:
            return _between(sent, event.at)
    return None


def transfer(timeline: Timeline) -> float | None:
    """From the last step's end to the arrival of all KV; 0 where the KV has flowed during the prefill."""
    events = _last_transfer(timeline)
    return _between(_first(events, What.PREFILL_DONE), _first(events, What.TRANSFERRED))


def last_phase(timeline: Timeline) -> str:
    """Where it ended."""
    return timeline.phases(timeline.began)[-1].name


def is_broken(timeline: Timeline) -> bool:
    """A stream that had begun, and whose last event was an error."""
    return timeline.error is not None and not timeline.is_abandoned and timeline.first(What.FIRST_TOKEN) is not None


def retries(timeline: Timeline) -> list[tuple[str, str]]:
    """Leg and reason of each failure that was hidden from the client."""
    retried = (event.facts for event in timeline.events if event.what is What.RETRIED)
    return [(str(facts["leg"]), str(facts["reason"])) for facts in retried]


def undivided_reason(timeline: Timeline) -> str | None:
    """Why a decode worker served it alone, if one did."""
    left = [event for event in timeline.events if event.what is What.LEFT_UNDIVIDED]
    return str(left[-1].facts["reason"]) if left and timeline.path == "undivided" else None


def _last_transfer(timeline: Timeline) -> list[Event]:
    """From the last time that a prefill worker was asked to the first token; nothing if none was.

    What happens behind the first token is for a stream that goes on, and is no part of what the client waited for.
    """
    found: list[Event] = []
    for event in timeline.events:
        if event.what is What.FIRST_TOKEN:
            break
        if event.what is What.PREFILL_SENT:
            found = [event]
        elif found:
            found.append(event)
    return found


def _first(events: list[Event], what: What) -> float | None:
    return next((event.at for event in events if event.what is what), None)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)
