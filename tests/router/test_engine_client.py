"""What the client of the engines promises, against a server of another make and against bytes cut anywhere."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from kvberth.router import engine_client
from kvberth.router.engine_client import EngineClient
from kvberth.router.engine_connection import Connection, ConnectTimeoutError, HttpError

from .fakes import until

pytestmark = pytest.mark.anyio

BODY = bytes(range(256)) * 300
GONE = "http://127.0.0.1:9"
STREAMS = 2000

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request):
    """Its transports are one loop's or the other's: the router runs on uvloop."""
    return "asyncio", {"use_uvloop": request.param}


class Heard:
    """A listener that keeps what it hears, and calls `on_data` for each piece."""

    def __init__(self, on_data: Callable[[bytes], None] | None = None) -> None:
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.body = b""
        self.error: HttpError | None = None
        self.ends = 0
        self.said_last = False
        self.ended = asyncio.Event()
        self.began = asyncio.Event()
        self._on_data = on_data

    def on_head(self, status, headers):
        assert not self.status
        self.status, self.headers = status, headers

    def on_body(self, data, is_last):
        assert not self.said_last
        self.said_last = is_last
        assert data
        assert self.status
        self.body += data
        self.began.set()
        if self._on_data is not None:
            self._on_data(data)

    def on_end(self, error):
        self.ends += 1
        self.error = error
        assert not (error and self.said_last)
        self.ended.set()

    async def end(self) -> "Heard":
        async with asyncio.timeout(20):
            await self.ended.wait()
        assert self.ends == 1
        return self


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """aiohttp's server, with one handler for every path."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=STREAMS)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving_bytes(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A server that knows no HTTP; nothing of it is left behind."""
    serving: list[asyncio.Task[None]] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        try:
            await serve(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    if serving:
        await asyncio.wait(serving)


@asynccontextmanager
async def saying(*pieces: bytes, hangs_up: bool = True) -> AsyncIterator[str]:
    """A server that answers whatever it is asked with these pieces, one write each."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if not hangs_up:
            await reader.read()

    async with serving_bytes(serve) as url:
        yield url


async def whole(request: web.Request) -> web.StreamResponse:
    return web.Response(body=await request.read(), headers={"X-Said": request.headers.get("x-asked", "")})


async def chunked(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    response.enable_chunked_encoding()
    await response.prepare(request)
    body = await request.read()
    for start in range(0, len(body), 7000):
        await response.write(body[start : start + 7000])
    return response


async def until_closed(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"connection": "close"})
    await response.prepare(request)
    await response.write(await request.read())
    return response


@pytest.mark.parametrize("handler", [whole, chunked, until_closed])
@pytest.mark.parametrize("body", [b"", b"a", BODY])
async def test_every_framing_gives_the_same_bytes(handler, body):
    """Twice in a row, on whatever connection is left."""
    async with serving(handler) as url, EngineClient(5) as client:
        for _ in range(2):
            answer = await client.fetch("POST", url, "/some/path?a=b", body=body)
            assert (answer.status, answer.body) == (200, body)


async def test_the_server_gets_what_was_sent():
    """The path below the site's own, the site's name, each header as its bytes are, and the key."""
    seen = []

    async def handler(request):
        seen.append((request.method, request.path_qs, request.host, request.raw_headers))
        return web.Response()

    async with serving(handler) as url, EngineClient(5, api_key="k") as client:
        await client.fetch("GET", f"{url}/base", "/x?y=1", headers=[("x-a", "\xe9\xff"), ("x-a", "2")])
    ((method, path, host, headers),) = seen
    assert (method, path, f"http://{host}") == ("GET", "/base/x?y=1", url)
    assert [value for name, value in headers if name == b"x-a"] == [b"\xe9\xff", b"2"]
    assert (b"authorization", b"Bearer k") in headers


@pytest.mark.parametrize("value", ["a\r\nx-evil: 1", "a\nb", "a\rb", "\u20ac"])
async def test_what_cannot_be_a_header_is_not_sent(value):
    """Nobody smuggles a second one in."""
    async with EngineClient(5) as client:
        with pytest.raises(ValueError, match=r"header|latin-1"):
            client.ask("GET", GONE, "/", Heard(), headers=[("x", value)])


async def test_one_connection_for_one_request_after_the_other():
    """And as many as there are requests at once."""
    peers = []
    may_answer = asyncio.Event()

    async def handler(request):
        peers.append(request.transport.get_extra_info("peername"))
        await may_answer.wait()
        return web.Response(body=b"x")

    async with serving(handler) as url, EngineClient(5) as client:
        asking = [asyncio.ensure_future(client.fetch("GET", url, "/")) for _ in range(3)]
        await until(lambda: len(peers) == 3)
        may_answer.set()
        await asyncio.gather(*asking)
        for _ in range(3):
            await client.fetch("GET", url, "/")
    assert len(set(peers[:3])) == 3
    assert set(peers[3:]) <= set(peers[:3])
    assert len(set(peers[3:])) == 1


async def test_a_name_is_looked_up_once(monkeypatch):
    """For all connections that are wanted at once; of its addresses the first that takes one is taken."""
    asked = []
    look_up = socket.getaddrinfo

    def counted(*args, **kwargs):
        asked.append(args[0])
        return look_up(*args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", counted)
    async with serving(whole) as url, EngineClient(5) as client:
        by_name = url.replace("127.0.0.1", "localhost")
        answers = await asyncio.gather(*(client.fetch("POST", by_name, "/", body=b"x") for _ in range(5)))
        await client.fetch("POST", by_name, "/", body=b"x")
    assert [answer.body for answer in answers] == [b"x"] * 5
    assert asked.count("localhost") <= 1  # uvloop asks without Python


async def test_a_connection_that_was_idle_for_long_is_not_used(monkeypatch):
    """Its engine may be closing it just now."""
    peers = []

    async def handler(request):
        peers.append(request.transport.get_extra_info("peername"))
        return web.Response()

    monkeypatch.setattr(engine_client, "_IDLE_SECONDS", 0.0)
    async with serving(handler) as url, EngineClient(5) as client:
        await client.fetch("GET", url, "/")
        await client.fetch("GET", url, "/")
    assert len(set(peers)) == 2


async def test_a_kept_connection_that_its_server_has_closed_is_not_used():
    """The end may be unread still: nothing is sent where nobody would answer, and nothing is sent twice."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        async with EngineClient(5) as client, asyncio.timeout(20):
            for number in range(3):
                # Between the close and this, the loop has had no chance to read of the connection's end.
                asking = Heard()
                client.ask("POST", f"http://127.0.0.1:{server.getsockname()[1]}", "/", asking, body=b"%d" % number)
                connection, _ = await loop.sock_accept(server)
                with connection:
                    connection.setblocking(False)
                    assert (await loop.sock_recv(connection, 4096)).endswith(b"%d" % number)
                    connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    await asking.end()
                    assert asking.error is None


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", "hung up"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n", "hung up"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\nZ\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n", "hung up"),
        (b"SSH-2.0-x\r\n\r\n", "no HTTP"),
        (b"", "hung up"),
    ],
)
async def test_an_answer_that_is_not_whole_is_an_error(answer, said):
    """What has come of it is told before."""
    async with saying(answer) as url, EngineClient(5) as client:
        heard = Heard()
        client.ask("POST", url, "/", heard)
        await heard.end()
        assert said in str(heard.error)
        assert heard.body in (b"", b"half")
        with pytest.raises(HttpError, match=said):
            await client.fetch("POST", url, "/")


async def test_a_connection_that_ends_as_it_is_made(monkeypatch):
    """Nobody waits for an answer on it."""

    async def gone(_client, _site):
        made = Connection(lambda _: None, lambda _: None)
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as server:
            await loop.create_connection(lambda: made, *server.getsockname())
        made.transport.abort()
        return made

    monkeypatch.setattr(EngineClient, "_open", gone)
    async with EngineClient(5) as client, asyncio.timeout(20):
        with pytest.raises(HttpError, match="hung up"):
            await client.fetch("GET", GONE, "/")


@pytest.mark.parametrize("behind", [b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nb", b"no HTTP at all\r\n\r\n"])
async def test_what_is_not_asked_for_ends_the_connection(behind):
    """A second answer, and junk behind the first one, belong to nobody."""
    said = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na" + behind
    async with saying(said, hangs_up=False) as url, EngineClient(5) as client:
        for _ in range(2):
            assert (await client.fetch("GET", url, "/")).body == b"a"
        assert not any(site.idle for site in client._sites.values())


async def test_an_interim_answer_is_passed_over():
    """103 says nothing that a leg needs."""
    said = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 201 Created\r\nx: 1\r\ncontent-length: 2\r\n\r\nab"
    async with saying(said) as url, EngineClient(5) as client:
        answer = await client.fetch("GET", url, "/")
    assert (answer.status, answer.headers, answer.body) == (201, (("x", "1"), ("content-length", "2")), b"ab")


async def test_an_answer_before_the_request_is_read():
    """It counts, and the connection, with the rest of a request on it, is not used again."""
    read = []

    async def serve(reader, writer):
        read.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nno!")
        while await reader.read(65536):
            pass

    async with serving_bytes(serve) as url, EngineClient(5) as client:
        for _ in range(2):
            answer = await client.fetch("POST", url, "/", body=b"x" * 20_000_000)
            assert (answer.status, answer.body) == (413, b"no!")
    assert len(read) == 2


async def test_who_refuses_the_connection():
    """The error says whose."""
    async with EngineClient(5) as client:
        with pytest.raises(HttpError, match=r"127\.0\.0\.1:9: .*Connect") as refused:
            await client.fetch("GET", GONE, "/")
    assert not isinstance(refused.value, TimeoutError)


async def test_who_is_nobody(monkeypatch):
    """A name without an address is looked up again the next time: it may have got one."""
    asked = []

    async def nobody(_site):
        asked.append(1)
        raise OSError("no such name")

    monkeypatch.setattr(engine_client._Site, "_look_up", nobody)
    async with EngineClient(20) as client:
        for _ in range(2):
            with pytest.raises(HttpError, match="no connection to nobody:80: no such name"):
                await client.fetch("GET", "http://nobody", "/")
    assert len(asked) == 2


async def test_who_does_not_answer_the_connection():
    """A handshake that does not come to its end counts too."""

    async def serve(reader, _writer):
        await reader.read()

    async with serving_bytes(serve) as url, EngineClient(0.05) as client, asyncio.timeout(20):
        with pytest.raises(ConnectTimeoutError, match=r"within 0\.05 s"):
            await client.fetch("GET", url.replace("http:", "https:"), "/")


@pytest.mark.parametrize("begins", [False, True])
async def test_who_gives_up_is_heard(begins):
    """The server loses its client, and the listener hears no more."""
    asked, gone = asyncio.Event(), asyncio.Event()

    async def handler(request):
        asked.set()
        response = web.StreamResponse()
        try:
            await response.prepare(request)
            if begins:
                await response.write(b"a")
            await asyncio.sleep(60)
        finally:
            gone.set()
        return response

    async with serving(handler) as url, EngineClient(5) as client:
        heard = Heard()
        ask = client.ask("POST", url, "/", heard)
        async with asyncio.timeout(20):
            await asked.wait()
            if begins:
                await heard.began.wait()
            ask.close()
            ask.close()
            await gone.wait()
        assert heard.ends == 0


async def test_who_gives_up_before_there_is_a_connection():
    """Nothing is left of it."""
    async with serving(whole) as url, EngineClient(5) as client:
        heard = Heard()
        client.ask("GET", url, "/", heard).close()
        assert (await client.fetch("GET", url, "/")).status == 200
        assert heard.ends == 0


async def test_a_listener_that_gives_up_in_the_middle():
    """It hears nothing of what the same read has brought."""
    async with serving(whole) as url, EngineClient(5) as client:
        asks = []
        heard = Heard(lambda _data: asks[0].close())
        asks.append(client.ask("POST", url, "/", heard, body=b"x"))
        await heard.began.wait()
        assert (await client.fetch("POST", url, "/", body=b"y")).body == b"y"
        assert heard.ends == 0


async def test_a_paused_answer_waits_in_its_server():
    """Nothing is collected on this side, and everything comes in the end."""
    written = []

    async def handler(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(300):
            await response.write(b"x" * 100_000)
            written.append(100_000)
        return response

    async with serving(handler) as url, EngineClient(5) as client:
        asks = []
        heard = Heard(lambda _data: asks[0].pause())
        asks.append(client.ask("POST", url, "/", heard))
        await heard.began.wait()
        seen = -1
        while seen != len(written):  # until its server gets rid of no more
            seen = len(written)
            await asyncio.sleep(0.2)
        assert len(heard.body) < 1_000_000
        assert sum(written) < 20_000_000
        heard._on_data = None
        asks[0].resume()
        assert len((await heard.end()).body) == 30_000_000
        # The connection reads again for the next request.
        assert (await client.fetch("GET", url, "/")).status == 200


async def test_many_at_once():
    """Each answer goes to who has asked, while all the others wait."""
    here, all_here = [], asyncio.Event()

    async def handler(request):
        here.append(1)
        if len(here) == STREAMS:
            all_here.set()
        await all_here.wait()
        return web.Response(body=await request.read())

    async with serving(handler) as url, EngineClient(60) as client, asyncio.timeout(100):
        bodies = [b"%d" % number for number in range(STREAMS)]
        answers = await asyncio.gather(*(client.fetch("POST", url, "/", body=body) for body in bodies))
    assert [answer.body for answer in answers] == bodies


class Bench:
    """An event loop for all examples."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def hear(self, pieces: list[bytes], *, hangs_up: bool) -> Heard:
        return self._runner.run(self._hear(pieces, hangs_up))

    async def _hear(self, pieces: list[bytes], hangs_up: bool) -> Heard:
        async with saying(*pieces, hangs_up=hangs_up) as url, EngineClient(20) as client:
            heard = Heard()
            client.ask("POST", url, "/", heard)
            return await heard.end()

    def close(self) -> None:
        self._runner.close()


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def framed(framing: str, chunks: list[bytes]) -> bytes:
    body = b"".join(chunks)
    match framing:
        case "length":
            return b"HTTP/1.1 200 OK\r\nX-A: b\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        case "chunks":
            said = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(each), each) for each in chunks if each)
            return b"HTTP/1.1 200 OK\r\nX-A: b\r\nTransfer-Encoding: chunked\r\n\r\n" + said + b"0\r\nx-t: 1\r\n\r\n"
        case _:
            return b"HTTP/1.1 200 OK\r\nX-A: b\r\nconnection: close\r\n\r\n" + body


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["length", "chunks", "end"]),
    st.lists(st.binary(min_size=1, max_size=40), max_size=5),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_bytes_may_come_in_any_pieces(bench, framing, chunks, cuts):
    """Where they are cut is chance: the head, the body and the end are the same, and each is told once."""
    said = framed(framing, chunks)
    places = [0, *sorted(cut for cut in cuts if cut < len(said)), len(said)]
    pieces = [said[begin:end] for begin, end in pairwise(places) if begin < end]
    heard = bench.hear(pieces, hangs_up=framing == "end")
    assert (heard.error, heard.status, heard.body) == (None, 200, b"".join(chunks))
    assert heard.headers[0] == ("x-a", "b")
    assert all(name != "x-t" for name, _ in heard.headers)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["length", "chunks"]), st.lists(st.binary(min_size=1, max_size=40), min_size=1), st.integers(0, 400)
)
def test_a_cut_anywhere_is_never_taken_for_the_end(bench, framing, chunks, cut):
    """An answer with a length that ends before it is an error, and what has come is a beginning of the answer."""
    said = framed(framing, chunks)
    heard = bench.hear([said[: min(cut, len(said) - 1)]], hangs_up=True)
    assert isinstance(heard.error, HttpError)
    assert b"".join(chunks).startswith(heard.body)
