"""Clients that do not read what they asked for, or do not send what they announce."""

import asyncio
import json
import socket
import tracemalloc

import pytest

from .fakes import answers, hangs

pytestmark = pytest.mark.anyio

CHUNK = b"data: " + b"x" * 65_000 + b"\n\n"
MEGABYTES = 64


def floods(sent):
    """An engine that streams far more than all buffers of two connections hold; `sent` counts what it got rid of."""

    async def behave(_seen, send):
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(MEGABYTES * 1_000_000 // len(CHUNK)):
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
            sent.append(len(CHUNK))
            await asyncio.sleep(0)
        await send({"type": "http.response.body"})

    return behave


def deaf_client(client, body, *, announce=0):
    """A socket that sends a request and reads nothing; its own buffer is small."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", int(client.url.rpartition(":")[2])))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: {len(data) + announce}\r\n\r\n"
    connection.sendall(head.encode() + data)
    connection.setblocking(False)
    return connection


async def test_a_client_that_stops_reading_holds_neither_memory_nor_engines(site):
    """The engine is held back, and after the stall both legs are aborted and the connection is cut in the middle."""
    sent = []
    prefill, decode = await site.prefill(hangs), await site.decode(floods(sent))
    client = await site.router([prefill], [decode], client_stall_seconds=0.5)
    tracemalloc.start()
    try:
        with deaf_client(client, {"prompt": "x", "stream": True}) as connection:
            async with asyncio.timeout(20):
                await decode.aborted.wait()
                await prefill.aborted.wait()
            await client.until_idle()
            peak_bytes = tracemalloc.get_traced_memory()[1]
            async with asyncio.timeout(5):
                assert not (await what_is_left(connection)).endswith(b"0\r\n\r\n")
    finally:
        tracemalloc.stop()
    # The kernel's buffers for two connections take some; the router and the fake engine together next to nothing.
    assert sum(sent) < MEGABYTES * 1_000_000 / 2
    assert peak_bytes < 4_000_000
    health = await client.health()
    assert [engine["in_flight"] for engine in health["prefill"] + health["decode"]] == [0, 0]
    assert await client.total("kvberth_router_client_stalls_total") == 1
    assert await client.metric('kvberth_router_requests_total{code="499",path="push"}') == 1


async def test_a_slow_client_that_reads_gets_all(site):
    """Time to read is bounded between bytes, not altogether."""
    sent = []
    client = await site.router([], [await site.decode(floods(sent))], wait_for="degraded", client_stall_seconds=1.5)
    received = 0
    async with client.post({"prompt": "x", "stream": True}) as response:
        for _ in range(8):
            await asyncio.sleep(0.2)
            received += len(await response.content.readany())
        received += len(await response.read())
    assert received == sum(sent)
    assert await client.total("kvberth_router_client_stalls_total") == 0


async def test_a_whole_answer_that_nobody_reads(site):
    """Its memory is given back after the stall."""
    decode = await site.decode(answers({"text": "x" * 20_000_000}))
    client = await site.router([], [decode], wait_for="degraded", client_stall_seconds=0.3)
    with deaf_client(client, {"prompt": "x"}) as connection:
        async with asyncio.timeout(10):
            await decode.arrived.wait()
            await client.until_idle()
            assert await client.total("kvberth_router_client_stalls_total") == 1
            assert len(await what_is_left(connection)) < 20_000_000


async def test_a_body_that_does_not_come(site):
    """408, and the place is free again."""
    client = await site.router([], [await site.decode()], wait_for="degraded", client_stall_seconds=0.1)
    with deaf_client(client, {"prompt": "x"}, announce=10) as connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(5):
            answer = await loop.sock_recv(connection, 65536)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"body_timeout" in answer
    await client.until_idle()


async def what_is_left(connection):
    """Read until the connection ends."""
    loop = asyncio.get_running_loop()
    received = b""
    try:
        while chunk := await loop.sock_recv(connection, 1 << 20):
            received += chunk
    except ConnectionResetError:
        pass
    return received
