"""Handoffs as the router saw them."""

import json

from kvberth.compare.journal import parse_handoffs


def request(request_id, **moments):
    events = [{"at_seconds": at, "what": what, "facts": {}} for what, at in moments.items()]
    return {"request_id": request_id, "events": events}


def test_from_the_prefill_worker_s_answer_to_the_first_token():
    """Of the requests that are asked for, and that were divided."""
    page = {
        "in_flight": [],
        "recent": [
            request("a", prefill_done=0.2, first_token=0.2125),
            request("early", prefill_done=0.2, first_token=0.19),
            request("undivided", first_token=0.1),
            request("other", prefill_done=0.2, first_token=0.3),
            request("a", prefill_done=0.2, first_token=0.9),
        ],
    }
    found = parse_handoffs(json.dumps(page).encode(), {"a", "early", "undivided"})
    assert found == {"a": 12.5, "early": 0.0}
