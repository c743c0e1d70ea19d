"""vLLM's own request classes understand what the legs are sent: the transfer reaches the engine at every endpoint."""

import json

import pytest

from kvberth.router.config import Mode
from kvberth.router.fields import Endpoint
from kvberth.router.request import parse_request
from kvberth.router.transfer import prefill_params

pytest.importorskip("vllm", reason="the request classes are vLLM's")
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {
    Endpoint.COMPLETIONS: {"prompt": "hi", "max_tokens": 50, "min_tokens": 5},
    Endpoint.CHAT: {"messages": MESSAGES, "max_completion_tokens": 50, "stream_options": {"include_usage": True}},
    Endpoint.RESPONSES: {"input": "hi", "max_output_tokens": 50, "store": True, "text": {"format": {"type": "text"}}},
    Endpoint.MESSAGES: {
        "messages": MESSAGES,
        "max_tokens": 5000,
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "stop_sequences": ["x"],
    },
}


def understood(endpoint, body):
    """The request as vLLM reads it, and the parameters that its engine gets."""
    match endpoint:
        case Endpoint.COMPLETIONS:
            request = CompletionRequest.model_validate_json(body)
            return request, request.to_sampling_params(request.max_tokens, {})
        case Endpoint.CHAT:
            request = ChatCompletionRequest.model_validate_json(body)
        case Endpoint.RESPONSES:
            request = ResponsesRequest.model_validate_json(body)
            return request, request.to_sampling_params(100_000, {})
        case Endpoint.MESSAGES:
            message = AnthropicMessagesRequest.model_validate_json(body)
            request = AnthropicServingMessages.to_chat_completion_request(message)
    return request, request.to_sampling_params(request.max_completion_tokens, {})


@pytest.mark.parametrize("endpoint", Endpoint)
def test_both_legs_carry_the_transfer_to_the_engine(endpoint):
    """P makes one token and streams nothing; D does what the client asked for."""
    body = json.dumps(BODIES[endpoint] | {"model": "m", "stream": True}).encode()
    request = parse_request(endpoint, body)
    assert request.obstacle is None
    to_prefill = prefill_params("t", num_consumers=1, mode=Mode.PUSH)
    to_decode = b'{"do_remote_prefill":true}'

    prefill, sampling = understood(endpoint, request.prefill_body(to_prefill))
    assert (prefill.stream, sampling.max_tokens) == (False, 1)
    assert sampling.extra_args["kv_transfer_params"] == json.loads(to_prefill)
    decode, sampling = understood(endpoint, request.decode_body(to_decode))
    assert decode.stream is True
    assert sampling.max_tokens >= 50
    assert sampling.extra_args["kv_transfer_params"] == json.loads(to_decode)
