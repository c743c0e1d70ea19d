"""From a client's body to the bodies of the two legs. Pure: bytes in, bytes out.

The body is read one level deep and once. D gets the client's own bytes with one field put in front; P gets the fields
that can shape the prompt, each as the client wrote it.

The lists below and in `obstacles.py` follow vLLM's `CompletionRequest`, `ChatCompletionRequest`, `ResponsesRequest` and
`AnthropicMessagesRequest` (0.32 and 0.33), all of which take `kv_transfer_params`. A field that they do not name stays
in P's body: a field that is sent needlessly costs nothing, one that is left out needlessly can give P another prompt
than D, and with it a KV cache that belongs to other tokens.
"""

import re

import msgspec

from kvberth.router.errors import RouterError
from kvberth.router.fields import Endpoint, Fields, count, is_set, read_fields, written
from kvberth.router.obstacles import is_continuable, num_consumers_and_obstacle
from kvberth.router.prefix import prefix_digests

__all__ = [
    "ClientRequest",
    "estimated_prompt_tokens",
    "parse_request",
    "take_transfer_params",
    "without_transfer_params",
]

_TRANSFER_FIELD = "kv_transfer_params"


# Not for P, whose single token is thrown away. Kept on purpose, because a renderer may write it into the prompt:
# messages, prompt, tools, tool_choice, response_format (in chat), reasoning_effort, documents, every chat_template and
# multi-modal field, truncation, special tokens, cache_salt, model, priority.
_NOT_FOR_ANY_PREFILL = frozenset(
    {
        # how the answer is sent
        *("stream", "stream_options", "stream_interval"),
        # what the answer shows beside its text
        *("logprobs", "top_logprobs", "logprob_token_ids", "echo", "return_tokens_as_token_ids", "return_token_ids"),
        *("return_prompt_text", "return_token_offsets", "routed_experts_prompt_start"),
        # how many answers; P prefills once for all of them
        *("n", "best_of"),
        # where the answer ends: P's ends after one token, and a minimum above that is an error
        *("max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
        *("include_stop_str_in_output", "thinking_token_budget", "repetition_detection"),
        # which tokens may come: grammars take long to compile and a per-request seed slows the batch
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("guided_decoding_backend", "guided_whitespace_pattern"),
        *("logit_bias", "allowed_token_ids", "bad_words", "seed", "watermarking"),
        *("temperature", "top_p", "top_k", "min_p", "length_penalty"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        # how the answer's tokens become text
        *("skip_special_tokens", "spaces_between_special_tokens"),
    }
)
_NOT_FOR_PREFILL = {
    # Some chat templates (Kimi, Cohere) write `response_format` into the prompt. A completion's prompt is what it is.
    Endpoint.COMPLETIONS: _NOT_FOR_ANY_PREFILL | {"response_format"},
    Endpoint.CHAT: _NOT_FOR_ANY_PREFILL,
    Endpoint.RESPONSES: _NOT_FOR_ANY_PREFILL
    | {"background", "include", "max_tool_calls", "metadata", "enable_response_messages"},
    Endpoint.MESSAGES: _NOT_FOR_ANY_PREFILL | {"metadata", "stop_sequences"},
}
# What makes P's answer one token, which nobody keeps.
_FOR_PREFILL: dict[Endpoint, dict[str, object]] = {
    Endpoint.COMPLETIONS: {"max_tokens": 1},
    Endpoint.CHAT: {"max_tokens": 1, "max_completion_tokens": 1},
    Endpoint.RESPONSES: {"max_output_tokens": 1, "store": False},
    Endpoint.MESSAGES: {"max_tokens": 1},
}
# What the prompt is made of, in the order in which renderers write it.
_PROMPT_FIELDS = {
    Endpoint.COMPLETIONS: ("prompt",),
    Endpoint.CHAT: ("messages",),
    Endpoint.RESPONSES: ("instructions", "input"),
    Endpoint.MESSAGES: ("system", "messages"),
}
_BYTES_PER_TOKEN = 4  # of English text; of others less, but not by an order of magnitude
# An image in its own bytes, as a URL or (Messages) as a field: vLLM makes some hundreds to a few thousand tokens of it,
# whatever its length.
_IMAGE_BEGINS = re.compile(rb'"data(?::|"\s*:\s*")')
_TOKENS_PER_IMAGE = 1000
# What renderers write before the conversation, and what else keeps one KV cache apart from another.
_PREFIX_SEED = ("model", "cache_salt", "tools")
_DEFAULT_COMPLETION_TOKENS = b"16"
_COUNTS_OF_TOKENS = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0}
_LONGEST_MODEL = 256


class ClientRequest:
    """One request as the client sent it.

    `obstacle` says why it cannot be split (a word for a header and a metric), or is None. `num_consumers` is how many
    sequences of D will load the prompt's KV. `prefixes` are digests of the prompt's beginnings, shortest first.
    `is_continuable` is whether its stream, if it breaks, may go on at another engine; see `continuation.py`.
    `shows_token_ids` is whether the client has asked to see them. `model` is empty where it names none.

    Args:
        prompt_token_ids: JSON of the ids that are to be taken for a chat's prompt, whatever its messages say.
    """

    __slots__ = (
        "_body",
        "_fields",
        "_prompt_token_ids",
        "endpoint",
        "estimated_prompt_tokens",
        "is_continuable",
        "is_streamed",
        "model",
        "num_consumers",
        "obstacle",
        "prefixes",
        "prompt_bytes",
        "shows_token_ids",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        body: bytes,
        fields: Fields,
        prompt_token_ids: bytes | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.is_streamed = is_set(fields, "stream")
        self.model = _model(fields.get("model"))
        prompt = _prompt(endpoint, fields)
        self.estimated_prompt_tokens = _estimated_tokens(endpoint, prompt, len(fields.get("tools", b"")))
        self.prompt_bytes = len(prompt)
        self.prefixes = prefix_digests((bytes(fields.get(name, b"")) for name in _PREFIX_SEED), prompt)
        self.num_consumers, self.obstacle = num_consumers_and_obstacle(endpoint, fields)
        self.is_continuable = self.is_streamed and self.obstacle is None and is_continuable(endpoint, fields, prompt)
        self.shows_token_ids = is_set(fields, "return_token_ids")
        self._body = body
        self._fields = fields
        self._prompt_token_ids = prompt_token_ids

    def prefill_body(self, transfer_params: bytes) -> bytes:
        """P's body: the fields that shape the prompt, one token, no stream."""
        dropped = _NOT_FOR_PREFILL[self.endpoint]
        kept: dict[str, object] = {name: value for name, value in self._fields.items() if name not in dropped}
        kept |= _FOR_PREFILL[self.endpoint]
        kept["stream"] = False
        kept[_TRANSFER_FIELD] = msgspec.Raw(self._with_prompt(transfer_params))
        return msgspec.json.encode(kept)

    def decode_body(self, transfer_params: bytes | None, *, with_token_ids: bool = False) -> bytes:
        """D's body: the client's own bytes, with the transfer's parameters in front, or unchanged without any.

        `with_token_ids` asks for the ids of prompt and answer too, unless the client has said what it wants.
        """
        front = []
        if transfer_params is not None or self._prompt_token_ids is not None:
            front.append(b'"kv_transfer_params":' + self._with_prompt(transfer_params or b"{}"))
        if with_token_ids:
            front.append(b'"return_token_ids":true')  # before the client's own, which counts then
        if not front:
            return self._body
        after_brace = self._body.index(b"{") + 1
        separator = b"," if self._fields else b""
        return b"".join((b"{", b",".join(front), separator, self._body[after_brace:]))

    def continued(self, prompt_token_ids: list[int], token_ids: list[int]) -> "ClientRequest":
        """The request for what is left of the answer: the same, with what was made of it as part of the prompt."""
        made = len(token_ids)
        fields = dict(self._fields)
        ids = msgspec.json.encode(prompt_token_ids + token_ids)
        prompt_of_chat: bytes | None = ids
        if self.endpoint is Endpoint.COMPLETIONS:
            fields["prompt"], prompt_of_chat = msgspec.Raw(ids), None
            fields.setdefault("max_tokens", msgspec.Raw(_DEFAULT_COMPLETION_TOKENS))
        for name, least in _COUNTS_OF_TOKENS.items():
            if (asked := count(fields, name)) is not None:
                fields[name] = msgspec.Raw(b"%d" % max(least, asked - made))
        return ClientRequest(self.endpoint, msgspec.json.encode(fields), fields, prompt_of_chat)

    def _with_prompt(self, transfer_params: bytes) -> bytes:
        if self._prompt_token_ids is None:
            return transfer_params
        separator = b"" if transfer_params == b"{}" else b","
        return b"".join((b'{"prompt_token_ids":', self._prompt_token_ids, separator, transfer_params[1:]))


def parse_request(endpoint: Endpoint, body: bytes) -> ClientRequest:
    """Read a client's body; raises `RouterError` (400) that says what is wrong and where."""
    try:
        fields = read_fields(body)
    except msgspec.ValidationError as error:
        raise RouterError(400, "The request body must be a JSON object.", code="not_an_object") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RouterError(400, f"The request body is not valid JSON: {error}.", code="malformed_json") from error
    if _TRANSFER_FIELD in fields or _TRANSFER_FIELD in _names_of(fields.get("vllm_xargs")):
        # A client that could name the peer of a transfer could send other people's KV anywhere.
        raise RouterError(
            400, f"{_TRANSFER_FIELD} is set by the router; leave it out.", code="reserved_field", param=_TRANSFER_FIELD
        )
    if endpoint is Endpoint.RESPONSES:
        _refuse_state(fields)
    return ClientRequest(endpoint, body, fields)


def estimated_prompt_tokens(endpoint: Endpoint, fields: Fields) -> int:
    """How long the prompt is: exact where it is given in token ids, a guess from its bytes where it is text."""
    return _estimated_tokens(endpoint, _prompt(endpoint, fields), len(fields.get("tools", b"")))


def _estimated_tokens(endpoint: Endpoint, prompt: bytes, tools_bytes: int) -> int:
    if endpoint is Endpoint.COMPLETIONS:
        if b'"' not in prompt and prompt.startswith(b"["):
            return _number_of_ids(prompt)
        return _tokens_of(len(prompt))
    images = _image_bytes(prompt)
    text_bytes = len(prompt) - sum(images) + tools_bytes
    # A field that is called `data` need not be an image, but is then hardly as long as one.
    return _tokens_of(text_bytes) + sum(min(_TOKENS_PER_IMAGE, _tokens_of(image)) for image in images)


def take_transfer_params(prefill_answer: bytes) -> bytes | None:
    """The transfer's parameters in the JSON that P answered, unchanged; None if there are none."""
    try:
        value = read_fields(prefill_answer).get(_TRANSFER_FIELD)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return None if value is None or bytes(value) == b"null" else bytes(value)


def without_transfer_params(answer: bytes) -> bytes:
    """D's JSON answer without the parameters that are none of the client's business; everything else as it was."""
    if b'"kv_transfer_params"' not in answer:
        return answer
    try:
        fields = read_fields(answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return answer
    fields.pop(_TRANSFER_FIELD, None)
    return msgspec.json.encode(fields)


def _refuse_state(fields: Fields) -> None:
    """A response that is stored is stored in one engine, and the next request may meet another one."""
    if written(fields, "previous_response_id") != b"null":
        text = "Responses are not stored behind this router: send the conversation as `input`."
        raise RouterError(400, text, code="stateless", param="previous_response_id")
    if is_set(fields, "background"):
        text = "Responses are not stored behind this router, so none can be made in the background."
        raise RouterError(400, text, code="stateless", param="background")


def _prompt(endpoint: Endpoint, fields: Fields) -> bytes:
    return b"".join(bytes(fields.get(name, b"")) for name in _PROMPT_FIELDS[endpoint])


def _tokens_of(text_bytes: int) -> int:
    return -(-text_bytes // _BYTES_PER_TOKEN)


def _image_bytes(prompt: bytes) -> list[int]:
    """The lengths of the images that a conversation holds in their own bytes."""
    lengths = []
    begin = _IMAGE_BEGINS.search(prompt)
    while begin is not None:
        end = prompt.find(b'"', begin.end())
        lengths.append(end - begin.end())
        begin = _IMAGE_BEGINS.search(prompt, end)
    return lengths


def _number_of_ids(prompt: bytes) -> int:
    """Ids in a list of them, or in a list of such lists: each but the last of a list is followed by a comma."""
    lists = prompt.split(b"]")
    return sum(1 + each.lstrip(b", \t\r\n[").count(b",") for each in lists if each.strip(b", \t\r\n["))


def _model(value: msgspec.Raw | None) -> str:
    """For people; whether it is a name at all is the engine's to judge."""
    try:
        return msgspec.json.decode(value or b'""', type=str)[:_LONGEST_MODEL]
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def _names_of(value: msgspec.Raw | None) -> frozenset[str]:
    try:
        return frozenset(read_fields(b"{}" if value is None else value))
    except msgspec.MsgspecError:
        return frozenset()
