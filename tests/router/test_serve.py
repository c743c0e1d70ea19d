"""The router as the process that people run: uvloop, httptools, signals."""

import asyncio
import signal
import socket
import sys

import aiohttp
import pytest

from .fakes import Client, hangs, streams

pytestmark = pytest.mark.anyio

PROMPT = {"prompt": "hi", "stream": True}
EVENT = b'data: {"choices":[]}\n\n'
PROGRAM = """
import sys
from kvberth.router import RouterConfig, serve
serve(RouterConfig(prefill=(sys.argv[1],), decode=(sys.argv[2],), port=int(sys.argv[3]), health_interval_seconds=0.05))
"""
PROGRAM_WITH_ADMIN = """
import logging
import sys
from kvberth.router import RouterConfig, serve
logging.basicConfig(level=logging.ERROR)
serve(RouterConfig(engines_file=sys.argv[1], port=int(sys.argv[2]), admin_port=int(sys.argv[3]), admin_api_key="k"))
"""
PROGRAM_WITH_FILE = """
import sys
from kvberth.router import RouterConfig, serve
serve(RouterConfig(engines_file=sys.argv[1], port=int(sys.argv[2]), health_interval_seconds=0.05))
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


async def until_it_listens(port):
    async with asyncio.timeout(60):  # a loaded machine imports the router in more than ten seconds
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                await writer.wait_closed()
                return


async def test_serve_streams_aborts_and_stops(site):
    """One life of the process: a stream, a client that goes, SIGTERM, a quiet end."""
    prefill, decode = await site.prefill(), await site.decode(streams(EVENT, then=hangs))
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, prefill.url, decode.url, str(port), stderr=asyncio.subprocess.PIPE
    )
    try:
        await until_it_listens(port)
        async with aiohttp.ClientSession() as session:
            client = Client(f"http://127.0.0.1:{port}", session)
            await client.until_healthy()
            async with asyncio.timeout(5):
                async with client.post(PROMPT) as response:
                    assert await response.content.readany() == EVENT
                    assert "server" not in response.headers
                await decode.aborted.wait()
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            _, errors = await process.communicate()
    assert errors == b""
    assert process.returncode == -signal.SIGTERM  # uvicorn raises it again when all is closed


async def test_serve_reads_the_engines_file_again_on_a_hangup(site, tmp_path):
    """The signal does not end the process, and whoever is named now serves."""
    decode = await site.decode()
    file = tmp_path / "engines"
    file.touch()
    port = free_port()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM_WITH_FILE, str(file), str(port))
    try:
        await until_it_listens(port)
        file.write_text(decode.url)
        process.send_signal(signal.SIGHUP)
        async with aiohttp.ClientSession() as session:
            client = Client(f"http://127.0.0.1:{port}", session)
            await client.until_healthy("degraded")
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            await process.wait()
    assert process.returncode == -signal.SIGTERM


async def start_with_admin(tmp_path, port, admin_port):
    file = tmp_path / "engines"
    file.touch()
    command = [sys.executable, "-c", PROGRAM_WITH_ADMIN, str(file), str(port), str(admin_port)]
    return await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)


async def test_serve_has_a_second_port_for_the_admin_api(site, tmp_path):
    """Engines are added there with its key, and there only; both ports end with the process."""
    decode = await site.decode()
    port, admin_port = free_port(), free_port()
    process = await start_with_admin(tmp_path, port, admin_port)
    try:
        await until_it_listens(port)
        async with aiohttp.ClientSession() as session:
            client = Client(f"http://127.0.0.1:{port}", session, f"http://127.0.0.1:{admin_port}")
            for authorization, status in (("Bearer x", 401), ("Bearer k", 201)):
                new = {"url": decode.url}
                async with client.admin("POST", "/kvberth/engines", new, authorization=authorization) as response:
                    assert response.status == status
            async with client.post({"url": decode.url}, "/kvberth/engines", authorization="Bearer k") as response:
                assert response.status == 405
            await client.until_healthy("degraded")
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            _, errors = await process.communicate()
    assert (process.returncode, errors) == (-signal.SIGTERM, b"")


@pytest.mark.parametrize("taken", ["admin_port", "port"])
async def test_a_port_that_is_taken_ends_the_start(tmp_path, taken):
    """With the reason in the log, and neither port open."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports = {"port": free_port(), "admin_port": free_port()} | {taken: other.getsockname()[1]}
        process = await start_with_admin(tmp_path, *ports.values())
        async with asyncio.timeout(30):
            _, errors = await process.communicate()
    assert process.returncode not in (0, None)
    assert b"address already in use" in errors.lower()
