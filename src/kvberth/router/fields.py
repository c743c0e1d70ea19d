"""The fields of a client's body, read one level deep: what is in them stays as the client wrote it. Pure."""

from enum import StrEnum

import msgspec

__all__ = ["Endpoint", "Fields", "count", "is_set", "read_fields", "written"]

Fields = dict[str, msgspec.Raw]

_ABSENT_VALUES = (b"null", b"false")
_decoder = msgspec.json.Decoder(Fields)


class Endpoint(StrEnum):
    """The paths that generate text."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


def read_fields(body: bytes) -> Fields:
    """Raises `msgspec.MsgspecError`, `UnicodeDecodeError` or `RecursionError` for what is no JSON object."""
    return _decoder.decode(body)


def written(fields: Fields, name: str) -> bytes:
    """A field's JSON; that of null where it is absent."""
    value = fields.get(name)
    return b"null" if value is None else bytes(value)


def is_set(fields: Fields, name: str) -> bool:
    """Whether a switch is on.

    vLLM reads "true", 1 and "yes" as true as well. What is neither absent nor false counts as set: the price of being
    wrong is a request that is served undivided.
    """
    value = fields.get(name)
    return value is not None and bytes(value) not in _ABSENT_VALUES


def count(fields: Fields, name: str) -> int | None:
    """A field's value, if it is a whole number that is not negative and of at most nine digits."""
    text = written(fields, name)
    return int(text) if text.isdigit() and len(text) < 10 else None
