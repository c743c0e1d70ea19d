"""A stream that breaks, and goes on at another engine as if nothing had been. Pure: bytes in, bytes out.

The engines are asked for token ids, which the client does not see unless it has asked for them itself. When an engine
goes away, the ids of the prompt and of what has been passed on are the prompt of a second request, and its events are
made to look like those of the first. Greedy answers are then the same tokens as without the break, as far as an engine
computes a token the same way in a prompt and in an answer; sampled ones are another, equally likely, continuation.
"""

import re

import msgspec

from kvberth.router.request import ClientRequest

__all__ = ["Continuation"]

# Inside a JSON string a quotation mark is escaped: these can be nothing but names of fields.
_IDS = re.compile(rb'"token_ids":\[([0-9,]*)\]')
_PROMPT_IDS = b'"prompt_token_ids":['
_IDS_BEGIN = b'"token_ids":['
_FINISHED = b'"finish_reason":"'
_NO_IDS = b'"token_ids":null'
_REASONING = re.compile(rb'"reasoning(?:_content)?":"')
_REASONING_BEGINS = b'"reasoning'
_EMPTY_DELTA = b'"delta":{}'
_DATA = b"data: "


class Continuation:
    """What has been passed on of one stream, and how it goes on.

    Args:
        request: the client's.
        shows_ids: the client has asked for token ids itself.
    """

    def __init__(self, request: ClientRequest, *, shows_ids: bool) -> None:
        self._request = request
        self._shows_ids = shows_ids
        self._prompt_ids: bytes | None = None
        self._ids: list[bytes] = []
        self._knows_all = True
        self._first: bytes | None = None
        self._head: _Head | None = None
        self._made_before = 0

    @property
    def is_possible(self) -> bool:
        """Whether what is known of the stream is enough to go on with it."""
        return self._knows_all and self._prompt_ids is not None

    @property
    def num_tokens(self) -> int:
        """Of the answer, as far as it has been passed on."""
        return len(self._token_ids())

    def request(self) -> ClientRequest:
        """For what is left of the answer; from now on `pass_on` gets the events of this one."""
        token_ids = self._token_ids()
        self._head = self._head or _head(self._first or b"")
        self._made_before = len(token_ids)
        return self._request.continued(_numbers(self._prompt_ids or b""), token_ids)

    def pass_on(self, events: bytes) -> bytes:
        """What the client gets of some whole events."""
        if self._first is None:
            self._first = events[:4096]
        if _PROMPT_IDS in events:
            events = self._pass_prompt_ids(events)
        if _NO_IDS in events or _FINISHED in events or (_REASONING_BEGINS in events and _REASONING.search(events)):
            self._knows_all = False
        events = self._pass_ids(events)
        if not self._shows_ids and _EMPTY_DELTA in events:
            events = _without_empty_deltas(events)
        return events if self._head is None else b"".join(map(self._rejoined, _split(events)))

    def _pass_ids(self, events: bytes) -> bytes:
        """Keep the ids of tokens, and take them out where the client has not asked for them."""
        mark = events.find(_IDS_BEGIN)
        if mark < 0:
            return events
        begin = mark + len(_IDS_BEGIN)
        end = events.find(b"]", begin)
        ids = events[begin:end]
        if ids.isdigit() and events.find(_IDS_BEGIN, end) < 0:
            # One token, as nearly always: patterns take longer.
            self._ids.append(ids)
            return events if self._shows_ids else b"".join((events[:mark], _NO_IDS, events[end + 1 :]))
        self._ids += [ids for ids in _IDS.findall(events) if ids]
        return events if self._shows_ids else _IDS.sub(_NO_IDS, events)

    def _pass_prompt_ids(self, events: bytes) -> bytes:
        """Keep a prompt's ids, and take them out where the client has not asked for them, or has got them before.

        Cut and not replaced by a pattern: they are most of a first token's bytes, on its way to the client.
        """
        begin = events.index(_PROMPT_IDS) + len(_PROMPT_IDS)
        end = events.find(b"]", begin)
        if end < 0:
            return events  # a piece of an event that is too large to be waited for
        if self._prompt_ids is None:
            self._prompt_ids = events[begin:end]
        is_shown = self._shows_ids and self._head is None
        return events if is_shown else b"".join((events[: begin - 1], b"null", events[end + 1 :]))

    def _rejoined(self, event: bytes) -> bytes:
        """An event of the second stream as the first would have gone on."""
        if not event.startswith(_DATA):
            return event
        try:
            chunk = msgspec.json.decode(event[len(_DATA) :], type=dict[str, msgspec.Raw])
            choices = msgspec.json.decode(chunk.get("choices", b"[]"), type=list[_Choice])
        except msgspec.MsgspecError:
            return event  # [DONE]
        if any(choice.delta.role is not None and not choice.delta.content for choice in choices):
            return b""  # each chat begins with one of these
        assert self._head is not None
        chunk |= self._head.fields()
        if "usage" in chunk and bytes(chunk["usage"]) != b"null":
            usage = msgspec.json.decode(chunk["usage"])
            usage["prompt_tokens"] -= self._made_before
            usage["completion_tokens"] = usage.get("completion_tokens", 0) + self._made_before
            chunk["usage"] = msgspec.Raw(msgspec.json.encode(usage))
        return b"".join((_DATA, msgspec.json.encode(chunk), b"\n\n"))

    def _token_ids(self) -> list[int]:
        return _numbers(b",".join(self._ids))


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Head(msgspec.Struct):
    """What all events of one stream have in common."""

    id: msgspec.Raw
    created: msgspec.Raw

    def fields(self) -> dict[str, msgspec.Raw]:
        return {"id": self.id, "created": self.created}


def _head(event: bytes) -> _Head:
    found = {name: re.search(rb'"%s":("[^"\\]*"|[0-9]+)' % name, event) for name in (b"id", b"created")}
    raw = [msgspec.Raw(match[1] if match else b"null") for match in found.values()]
    return _Head(*raw)


def _numbers(ids: bytes) -> list[int]:
    return msgspec.json.decode(b"[" + ids + b"]", type=list[int])


def _split(events: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in events.split(b"\n\n") if event]


def _without_empty_deltas(events: bytes) -> bytes:
    """Engines with a parser send these for tokens without text only where ids are asked for."""
    return b"".join(
        event for event in _split(events) if _EMPTY_DELTA not in event or b'"finish_reason":null' not in event
    )
