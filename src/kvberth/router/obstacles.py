"""What keeps a request from being split between two engines, and its stream from going on at another one. Pure."""

from collections.abc import Iterator

import msgspec

from kvberth.router.fields import Endpoint, Fields, count, is_set, written

__all__ = ["is_continuable", "num_consumers_and_obstacle"]

# Tools that the client runs. All others vLLM runs itself, between several requests to its engine.
_CLIENTS_TOOLS = frozenset({"function", "custom", "namespace"})
# What a continued stream cannot have: text of one stream that hides tokens of the other, state that begins with the
# first token, and positions that count from it.
_NOT_CONTINUABLE = frozenset(
    {
        *("stop", "echo", "tools", "functions", "prompt_embeds", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("thinking_token_budget", "repetition_detection"),
    }
)
_SIGNS_OF_MEDIA = (b'_url"', b'"input_audio"', b'"image', b'"audio', b'"video')
_NO_VALUES = (b"null", b"false", b"[]", b"0", b"0.0", b'""')
_PLAIN_FORMATS = (b"null", b'{"type":"text"}', b'{"type": "text"}')


def num_consumers_and_obstacle(endpoint: Endpoint, fields: Fields) -> tuple[int, str | None]:
    """How many sequences of D will load the prompt's KV, and why the request cannot be split.

    The latter is a word for a header and a metric, or None where it can be.
    """
    match endpoint:
        case Endpoint.COMPLETIONS | Endpoint.CHAT:
            return _consumers(fields), next(_obstacles(endpoint, fields), None)
        case Endpoint.RESPONSES:
            return 1, _responses_obstacle(fields)
        case Endpoint.MESSAGES:
            return 1, None


def is_continuable(endpoint: Endpoint, fields: Fields, prompt: bytes) -> bool:
    """Whether a stream that breaks may go on at another engine; see `continuation.py`."""
    if endpoint not in (Endpoint.COMPLETIONS, Endpoint.CHAT) or _consumers(fields) != 1:
        return False
    if any(bytes(fields[name]) not in _NO_VALUES for name in _NOT_CONTINUABLE & fields.keys()):
        return False
    if endpoint is Endpoint.COMPLETIONS and written(fields, "logprobs") != b"null":
        return False  # their offsets count from the first character
    if endpoint is Endpoint.CHAT and any(sign in prompt for sign in _SIGNS_OF_MEDIA):
        return False  # the ids of a prompt do not hold its images
    return written(fields, "response_format") in _PLAIN_FORMATS


def _consumers(fields: Fields) -> int:
    return count(fields, "n") or 1


def _obstacles(endpoint: Endpoint, fields: Fields) -> Iterator[str]:
    if written(fields, "n") != b"null" and not count(fields, "n"):
        yield "n_not_a_count"
    if written(fields, "prompt_logprobs") != b"null":
        yield "prompt_logprobs"
    truncated = written(fields, "truncate_prompt_tokens")
    if truncated != b"null" and not truncated.isdigit():
        # -1 cuts the prompt to what `max_tokens` leaves of the context, and P's `max_tokens` is another one.
        yield "truncation"
    if is_set(fields, "use_beam_search"):
        yield "beam_search"
    # In chat vLLM takes the number of prompt logprobs from `top_logprobs`, which is 0 and not none by default.
    if is_set(fields, "echo") and (endpoint is Endpoint.CHAT or written(fields, "logprobs") != b"null"):
        yield "echo_logprobs"
    if endpoint is Endpoint.COMPLETIONS:
        prompts = _number_of_prompts(written(fields, "prompt")) + _number_of_prompts(written(fields, "prompt_embeds"))
        if prompts > 1:
            yield "several_prompts"


def _responses_obstacle(fields: Fields) -> str | None:
    if written(fields, "truncation") not in (b"null", b'"disabled"'):
        return "truncation"
    try:
        tools = msgspec.json.decode(written(fields, "tools"), type=list[_Tool] | None)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "builtin_tools"
    return None if all(tool.type in _CLIENTS_TOOLS for tool in tools or ()) else "builtin_tools"


class _Tool(msgspec.Struct):
    type: str


def _number_of_prompts(prompt: bytes) -> int:
    if prompt == b"null":
        return 0
    if not prompt.startswith(b"["):
        return 1
    if prompt[1:].lstrip()[:1] not in (b'"', b"["):
        return 1  # token ids: one prompt, however long
    return len(msgspec.json.decode(prompt, type=list[msgspec.Raw]))
