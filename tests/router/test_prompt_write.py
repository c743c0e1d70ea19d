"""Bytes that are on their way before the event loop turns, over real sockets."""

import asyncio
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kvberth.router.prompt_write import prompt_write

from .fakes import until

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Its transports are one loop's or the other's."""
    return "asyncio", {"use_uvloop": request.param}


class Ours(asyncio.Protocol):
    def __init__(self) -> None:
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set_result(error)


@pytest.fixture
def peers() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Ours and the other side's; over TCP, where a peer that resets is heard of."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            theirs.settimeout(5)
            yield ours, theirs


async def connected(ours: socket.socket) -> tuple[Any, Ours]:
    ours.setblocking(False)
    return await asyncio.get_running_loop().create_connection(Ours, sock=ours)


async def test_it_is_there_before_the_loop_turns(peers):
    """The other side has it while we still run."""
    ours, theirs = peers
    transport, _ = await connected(ours)
    prompt_write(transport)(b"at once")
    assert theirs.recv(100) == b"at once"
    transport.abort()


async def test_what_the_socket_does_not_take_comes_in_order(peers):
    """Through the transport, and so does all that is written behind it until that is empty."""
    ours, theirs = peers
    transport, _ = await connected(ours)
    write = prompt_write(transport)
    pieces = [bytes([number]) * 300_000 for number in range(20)]
    for piece in pieces:
        write(piece)
    assert transport.get_write_buffer_size() > 0
    expected = b"".join(pieces) + b"end"

    def read_all() -> bytes:
        received = bytearray()
        while len(received) < len(expected):
            received += theirs.recv(1 << 20)
        return bytes(received)

    reading = asyncio.get_running_loop().run_in_executor(None, read_all)
    await until(lambda: not transport.get_write_buffer_size())
    write(b"end")
    assert await reading == expected
    transport.abort()


async def test_a_closed_transport_s_descriptor_is_left_alone(peers):
    """It may be another connection's by then."""
    ours, _ = peers
    reader, writer = os.pipe()
    transport, protocol = await connected(ours)
    descriptor = transport.get_extra_info("socket").fileno()
    write = prompt_write(transport)
    transport.abort()
    await protocol.lost
    ours.close()
    os.dup2(writer, descriptor)  # as the next one that is opened would be
    try:
        write(b"for the one that is gone")
        await asyncio.sleep(0.05)
        os.set_blocking(reader, False)
        with pytest.raises(BlockingIOError):
            os.read(reader, 100)
    finally:
        for each in (reader, writer, descriptor):
            os.close(each)


async def test_a_broken_connection_is_told_as_ever(peers):
    """By `connection_lost`, not by an exception."""
    ours, theirs = peers
    transport, protocol = await connected(ours)
    write = prompt_write(transport)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    theirs.close()  # a reset
    write(b"one")
    write(b"two")
    await asyncio.wait_for(protocol.lost, 5)


async def test_tls_is_left_to_the_transport():
    """What is written there is not what goes over the wire."""

    class Tls:
        def get_extra_info(self, name: str) -> object:
            return {"sslcontext": object()}[name]

        def write(self, data: bytes) -> None: ...

    transport: Any = Tls()
    assert prompt_write(transport) == transport.write
