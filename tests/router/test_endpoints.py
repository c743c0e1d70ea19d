"""The endpoints beside completions and chat: what is split, what is relayed, and what is not there."""

import asyncio
import json

import pytest

from kvberth.router.config import Mode
from kvberth.router.relay import Relayed

from .fakes import D_ANSWER, P_ANSWER, answers, dies, half_answer, hangs, streams, until

pytestmark = pytest.mark.anyio

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
RESPONSE = {"model": "m", "input": "hi", "max_output_tokens": 5}
MESSAGE = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
EVENTS = [
    b'event: message_start\ndata: {"type":"message_start"}\n\n',
    b'event: message_stop\ndata: {"type": "message_stop"}\n\n',
]


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(("path", "body"), [(RESPONSES, RESPONSE), (MESSAGES, MESSAGE)])
async def test_responses_and_messages_are_split(site, mode, path, body):
    """Both legs at the same endpoint; the client gets D's answer without the transfer's parameters."""
    prefill = await site.prefill()
    decode = await site.decode(answers(D_ANSWER | {"kv_transfer_params": None}))
    client = await site.router([prefill], [decode], mode=mode)
    async with client.post(body, path) as response:
        assert (response.status, await response.json()) == (200, D_ANSWER)
        assert response.headers["x-kvberth-path"] == mode
    assert [prefill.seen[0].path, decode.seen[0].path] == [path, path]
    assert prefill.seen[0].transfer["do_remote_decode"] is True
    if mode is Mode.PULL:
        assert decode.seen[0].transfer == P_ANSWER["kv_transfer_params"]
    else:
        assert decode.seen[0].transfer["transfer_id"] == prefill.seen[0].transfer["transfer_id"]
    assert {name: decode.seen[0].json[name] for name in body} == body


@pytest.mark.parametrize(("path", "body"), [(RESPONSES, RESPONSE), (MESSAGES, MESSAGE)])
async def test_their_streams_pass_byte_for_byte(site, path, body):
    """Names of events too."""
    client = await site.router([await site.prefill()], [await site.decode(streams(*EVENTS))])
    async with client.post(body | {"stream": True}, path) as response:
        assert await response.read() == b"".join(EVENTS)


@pytest.mark.parametrize(("path", "body"), [(RESPONSES, RESPONSE), (MESSAGES, MESSAGE)])
async def test_their_broken_streams_end_with_their_kind_of_error(site, path, body):
    """A client of that API understands that the answer is not whole."""
    client = await site.router([await site.prefill()], [await site.decode(streams(EVENTS[0], then=dies))])
    async with client.post(body | {"stream": True}, path) as response:
        received = await response.read()
    name, data = received.removeprefix(EVENTS[0]).split(b"\n", 1)
    assert name == b"event: error"
    said = json.loads(data.removeprefix(b"data: "))
    assert said["type"] == "error"
    assert "went away" in said["error"]["message"]


async def test_errors_at_messages_are_anthropics(site):
    """The router's own, those for what an engine did not say readably, and those of the framework."""
    decode = await site.decode(answers(b"oops", 500))
    client = await site.router([await site.prefill()], [decode])
    for send in (
        client.post(b"[]", MESSAGES),
        client.post(MESSAGE, MESSAGES),
        client.post(MESSAGE, f"{MESSAGES}/nothing"),
        client.get(MESSAGES),
    ):
        async with send as response:
            assert response.status >= 400
            said = await response.json()
        assert said["type"] == "error"
        assert set(said["error"]) == {"type", "message"}


@pytest.mark.parametrize("field", [{"previous_response_id": "r"}, {"background": True}])
async def test_responses_that_need_a_memory(site, field):
    """Refused before any engine hears of it."""
    prefill, decode = await site.prefill(), await site.decode()
    client = await site.router([prefill], [decode])
    async with client.post(RESPONSE | field, RESPONSES) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, "stateless")
    assert prefill.seen == decode.seen == []


async def test_stored_responses_are_not_there(site):
    """To read, to delete or to cancel: a 404 that says why."""
    client = await site.router([await site.prefill()], [await site.decode()])
    for send in (
        client.get(f"{RESPONSES}/resp_1"),
        client.session.delete(f"{client.url}{RESPONSES}/resp_1"),
        client.post(b"", f"{RESPONSES}/resp_1/cancel"),
    ):
        async with send as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"]) == (404, "stateless")
        assert "not stored" in error["message"]


@pytest.mark.parametrize("path", Relayed)
async def test_what_one_engine_can_do_is_relayed(site, path):
    """A decode worker gets the client's own bytes, the client its answer."""
    prefill, decode = await site.prefill(), await site.decode(answers({"tokens": [1]}))
    client = await site.router([prefill], [decode])
    body = b' {"prompt" : "x"} '
    async with client.post(body, path) as response:
        assert (response.status, await response.json()) == (200, {"tokens": [1]})
        assert "x-kvberth-path" not in response.headers
    assert prefill.seen == []
    assert (decode.seen[0].path, decode.seen[0].body) == (path, body)
    assert await client.total("kvberth_router_requests_total", path="relayed", code="200") == 1
    assert (await client.health())["decode"][0]["in_flight"] == 0


async def test_an_engine_s_own_404_is_relayed(site):
    """Whether it has an endpoint is its own to say."""
    client = await site.router([], [await site.decode(answers({"detail": "Not Found"}, 404))], wait_for="degraded")
    async with client.post({}, Relayed.CLASSIFY) as response:
        assert (response.status, await response.json()) == (404, {"detail": "Not Found"})


async def test_relaying_finds_another_engine(site):
    """A decode worker that hangs up is passed over; a prefill worker can do it as well."""
    prefill = await site.prefill(answers({"tokens": []}))
    client = await site.router([prefill], [await site.decode(half_answer(b"{"))])
    async with client.post({}, Relayed.TOKENIZE) as response:
        assert (response.status, await response.json()) == (200, {"tokens": []})


async def test_relaying_without_engines(site):
    """503 before, 502 after an engine was asked."""
    client = await site.router([], ["http://127.0.0.1:9"], wait_for="unavailable")
    async with client.post({}, Relayed.TOKENIZE) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "no_engine")
    client = await site.router([], [await site.decode(half_answer(b"{"))], wait_for="degraded")
    async with client.post({}, Relayed.TOKENIZE) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (502, "engine_failed")


async def test_relaying_has_the_limits_of_every_request(site):
    """Its deadline, its size, its client's going."""
    decode = await site.decode(hangs)
    client = await site.router([], [decode], wait_for="degraded", max_body_bytes=1000)
    async with client.post({}, Relayed.TOKENIZE, x_kvberth_timeout_seconds="0.05") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (504, "engine_timeout")
    async with client.post({"prompt": "x" * 2000}, Relayed.TOKENIZE) as response:
        assert response.status == 413
    decode.arrived.clear()
    decode.aborted.clear()
    asking = asyncio.ensure_future(client.text({}, path=Relayed.TOKENIZE))
    async with asyncio.timeout(5):
        await decode.arrived.wait()
        asking.cancel()
        await decode.aborted.wait()
    await client.until_idle()


async def test_what_is_relayed_is_in_flight_at_its_engine(site):
    """Others are preferred meanwhile, and an engine that is to go is not gone before its answer."""
    may_end = asyncio.Event()
    busy, idle = await site.decode(answers({}, after=may_end)), await site.decode(answers({}))
    client = await site.router([], [busy], wait_for="degraded")
    asking = asyncio.ensure_future(client.text({}, path=Relayed.TOKENIZE))
    await client.until_engine(busy, in_flight=1)
    async with client.admin("POST", "/kvberth/engines", {"url": idle.url}) as response:
        assert response.status == 201
    await client.until_engine(idle, ready=True)
    for _ in range(2):
        await client.text({}, path=Relayed.TOKENIZE)
    assert (len(busy.seen), len(idle.seen)) == (1, 2)
    async with client.admin("DELETE", f"/kvberth/engines?url={busy.url}") as response:
        assert (await response.json())["leaving"] is True
    may_end.set()
    assert await asking == "{}"
    await until(lambda: is_gone(client, busy))
    async with client.admin("POST", "/kvberth/engines/drain", {"url": idle.url}) as response:
        assert response.status == 200
    async with client.post({}, Relayed.TOKENIZE) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "no_engine")


async def is_gone(client, engine):
    return await client.engine(engine) is None


async def test_relayed_requests_without_an_answer_open_the_breaker(site):
    """An engine that is healthy, as it says, and hangs up on three in a row gets nothing for a while."""
    decode = await site.decode(half_answer(b"{"))
    client = await site.router([], [decode], wait_for="degraded")
    for failures in (1, 2, 3):
        async with client.post({}, Relayed.TOKENIZE) as response:
            assert response.status == 502
        await client.until_engine(decode, ready=True)
        assert (await client.engine(decode))["breaker"]["failures_in_a_row"] == failures
    assert (await client.engine(decode))["breaker"]["state"] == "open"
    async with client.post({}, Relayed.TOKENIZE) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "no_engine")


@pytest.mark.parametrize("status", [200, 404, 501])
async def test_relayed_answers_prove_nothing_of_generating(site, status):
    """Neither for nor against an engine: that it cannot embed is no failure, that it tokenizes is no success."""
    decode = await site.decode(answers({}, 500))
    client = await site.router([], [decode], wait_for="degraded")
    for _ in range(2):
        await client.text(MESSAGE, MESSAGES)
    decode.behave = answers({}, status)
    for _ in range(3):
        async with client.post({}, Relayed.EMBEDDINGS) as response:
            assert response.status == status
    assert (await client.engine(decode))["breaker"] == {
        "state": "closed",
        "failures_in_a_row": 2,
        "retry_in_seconds": None,
    }


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (RESPONSES, {"input": "x" * 1000}),
        (RESPONSES, {"instructions": "x" * 1000}),
        (MESSAGES, {"messages": [{"role": "user", "content": "x" * 1000}]}),
        (MESSAGES, {"system": "x" * 1000}),
    ],
)
async def test_a_prompt_comes_back_to_the_engine_that_has_seen_it(site, path, fields):
    """At these endpoints too; and its length counts at its engine while it is there."""
    may_end = asyncio.Event()
    prefills = [await site.prefill(), await site.prefill()]
    client = await site.router(prefills, [await site.decode()], mode="pull", affinity_seconds=9)
    body = {"model": "m"} | fields
    for _ in range(4):
        await client.text(body, path)
    assert sorted(len(prefill.seen) for prefill in prefills) == [0, 4]
    (familiar,) = [prefill for prefill in prefills if prefill.seen]
    familiar.behave = answers(P_ANSWER, after=may_end)
    asking = asyncio.ensure_future(client.text(body, path))
    await client.until_engine(familiar, in_flight=1)
    assert 250 <= (await client.engine(familiar))["prompt_tokens_in_flight"] < 275
    may_end.set()
    await asking


async def test_one_model_is_asked_for_by_name(site):
    """Names have slashes; they are no way to another path of an engine."""
    decode = await site.decode(answers({"id": "org/m"}))
    client = await site.router([], [decode], wait_for="degraded")
    async with client.get("/v1/models/org/m%20%3F") as response:
        assert await response.json() == {"id": "org/m"}
    assert decode.seen[0].path == "/v1/models/org/m ?"
    for name in ("%2E%2E/%2E%2E/start_profile", "..%2F..%2Fmetrics"):
        request = f"GET /v1/models/{name} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
        assert (await raw(client, request)).startswith(b"HTTP/1.1 404")
    assert len(decode.seen) == 1


async def raw(client, request):
    """The answer to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize("path", ["/v1/nothing", "/nothing", "/v1/completions/", "/v1/audio/speech"])
async def test_what_is_not_there(site, path):
    """A 404 in OpenAI's form that lists what is."""
    client = await site.router([await site.prefill()], [await site.decode()])
    async with client.post({}, path) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (404, "not_found")
    assert set(error) == {"message", "type", "param", "code"}
    assert "/v1/chat/completions" in error["message"]
    assert "/v1/embeddings" in error["message"]
    listed = error["message"].rstrip(".").partition("There is: ")[2].split(", ")
    assert len(listed) == len(set(listed))
    assert {"/kvberth/engines", "/kvberth/requests", "/openapi.json", "/v1/models/{id}"} <= set(listed)


async def test_a_method_that_is_not_taken(site):
    """405 with the ones that are."""
    client = await site.router([await site.prefill()], [await site.decode()])
    async with client.get("/v1/completions") as response:
        assert (response.status, response.headers["allow"]) == (405, "POST")
        assert (await response.json())["error"]["code"] == "method_not_allowed"
