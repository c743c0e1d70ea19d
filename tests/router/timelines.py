"""Timelines of requests as they happen, for tests of what is made of them."""

from kvberth.router.timeline import Timeline, What

ARRIVED_AT = 1_700_000_000.0
BEGAN = 100.0  # on a clock of its own


def timeline(*happened: tuple[float, What, dict], ends_at: float, path: str = "push", status: int = 200, **fields):
    """A request that came at 0; times are in seconds from there."""
    made = Timeline("r-1", "/v1/completions", ARRIVED_AT, BEGAN, mode="push", path=path)
    for at, what, facts in happened:
        made.note(BEGAN + at, what, **facts)
    for name, value in fields.items():
        setattr(made, name, value)
    made.end(BEGAN + ends_at, status)
    return made


def admitted(at: float):
    return at, What.ADMITTED, {"prompt_tokens": 100, "streamed": True, "model": "m"}


def to_prefill(at: float, engine: str = "http://p:1", transfer_id: str = "t-1"):
    return at, What.PREFILL_SENT, {"engine": engine, "reason": "the only one", "transfer_id": transfer_id}


def to_decode(at: float, engine: str = "http://d:2", attempt: int = 0):
    return at, What.DECODE_SENT, {"engine": engine, "reason": "most free KV", "attempt": attempt}


def bound(at: float, binding: str = "early"):
    return at, What.BINDING_CHOSEN, {"binding": binding, "reason": "as asked for"}


def failed(at: float, leg: str, kind: str = "unreachable"):
    return at, What.LEG_FAILED, {"leg": leg, "kind": kind, "detail": f"the {leg} worker is gone"}


def retried(at: float, leg: str, reason: str = "unreachable"):
    return at, What.RETRIED, {"leg": leg, "reason": reason}


def noted(at: float, what: What, **facts):
    return at, what, facts


def a_push() -> Timeline:
    """Everything that can be known of a streamed push that goes well: four tokens in a second behind the first."""
    return timeline(
        admitted(0.0),
        to_prefill(0.25),
        bound(0.25),
        to_decode(0.25),
        noted(0.5, What.PREFILL_BEGAN),
        noted(0.75, What.REGISTERED),
        noted(1.5, What.PREFILL_DONE),
        noted(1.625, What.TRANSFERRED),
        noted(2.0, What.FIRST_TOKEN),
        ends_at=3.5,
        waited_seconds=0.125,
        output_tokens=5,
        last_token_at=3.0,
    )
