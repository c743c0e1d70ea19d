"""What the router of a cluster says of each request: where the time to its first token went, in every mode alike.

vLLM leaves `kv_transfer_params`, and with it the connector's own timeline, out of streams; and vLLM's connectors have
none. The router sees when the decode worker's first token comes; and hears of the end of the prefill, from kvberth's
connector when the last forward pass is done, of an engine without it by its answer, which takes some ms more.
"""

import urllib.request
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

__all__ = ["parse_handoffs", "read_handoffs"]

_DONE, _FIRST = "prefill_done", "first_token"


def read_handoffs(router_url: str, request_ids: Collection[str]) -> dict[str, float]:
    """See `parse_handoffs`. Raises `OSError` if the router does not answer."""
    with urllib.request.urlopen(f"{router_url}/kvberth/requests", timeout=10) as answer:  # noqa: S310 - our own URL
        return parse_handoffs(answer.read(), request_ids)


def parse_handoffs(page: bytes, request_ids: Collection[str]) -> dict[str, float]:
    """Milliseconds from the end of the prefill to the first token, by request id.

    A request that was not divided has none. A token that came before the news of that end makes it 0.

    Args:
        page: the router's list of requests, newest first; an id that stands there twice counts once.
        request_ids: the ones to look for.
    """
    found: dict[str, float] = {}
    for each in msgspec.json.decode(page).get("recent", ()):
        request_id = each["request_id"]
        if request_id in request_ids and request_id not in found:
            times = _times(each["events"])
            if _DONE in times and _FIRST in times:
                found[request_id] = round(max(0.0, times[_FIRST] - times[_DONE]) * 1000, 3)
    return found


def _times(events: list[Mapping[str, Any]]) -> dict[str, float]:
    """When each kind of event happened, for the last time."""
    return {event["what"]: event["at_seconds"] for event in events}
