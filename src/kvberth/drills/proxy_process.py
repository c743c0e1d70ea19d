"""`python -m kvberth.drills.proxy_process SEED LISTEN UPSTREAM`: stands between a prefill worker's control channel and
those who dial it, and meddles with the messages.

LISTEN and UPSTREAM are HOST:PORT. It says `ready`, takes one `Meddling` in JSON per line of standard input, and
confirms each with what it has hit so far: messages, and connections that it cut. But for that it is as if it were not
there: while the worker is dead nobody listens, and a connection that one side closes is closed at the other, since both
are signs that the other side reads.
"""

import asyncio
import contextlib
import sys

import msgspec

from kvberth.drills.zmtp import Frames, Meddler, Meddling

__all__: list[str] = []

_READ_BYTES = 1 << 16
_LOOK_SECONDS = 0.05
"""Between two looks at a worker that is not there."""

_Address = tuple[str, int]


class _Proxy:
    def __init__(self, seed: int, listen: _Address, upstream: _Address) -> None:
        self._listen = listen
        self._upstream = upstream
        self._meddler = Meddler(seed)
        self._pairs: set[asyncio.Task[None]] = set()
        self._has_lost_upstream = asyncio.Event()
        self._flows = asyncio.Event()
        self._flows.set()
        self._num_cut = 0

    @property
    def hits(self) -> dict[str, int]:
        return {"messages": self._meddler.hits, "cut": self._num_cut}

    def obey(self, what: Meddling) -> None:
        """Meddle so from now on."""
        if what.cuts:
            self._num_cut += len(self._pairs)
            self._cut_all()
        self._meddler.meddling = what
        if what.is_stalled:
            self._flows.clear()
        else:
            self._flows.set()

    async def run(self) -> None:
        """Listen whenever the worker does."""
        while True:
            while not await self._is_upstream_there():  # noqa: ASYNC110 - another process
                await asyncio.sleep(_LOOK_SECONDS)
            self._has_lost_upstream.clear()
            server = await asyncio.start_server(self._accept, *self._listen)
            await self._has_lost_upstream.wait()
            server.close()
            self._cut_all()

    async def _is_upstream_there(self) -> bool:
        try:
            _, writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            return False
        writer.transport.abort()
        return True

    def _cut_all(self) -> None:
        for pair in self._pairs:
            pair.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pair = asyncio.create_task(self._join(reader, writer))
        self._pairs.add(pair)
        pair.add_done_callback(self._pairs.discard)
        with contextlib.suppress(asyncio.CancelledError):
            await pair

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            writer.transport.abort()
            self._has_lost_upstream.set()
            return
        pumps = [asyncio.create_task(self._pump(*ends)) for ends in ((reader, up_writer), (up_reader, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # As when a process dies: what one side has said last has been passed on, and nothing follows.
            for pump in pumps:
                pump.cancel()
            up_writer.close()
            writer.close()
        if not await self._is_upstream_there():
            self._has_lost_upstream.set()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, until one of the sides closes."""
        late: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()
        delivery = asyncio.create_task(self._deliver(late, writer))
        loop = asyncio.get_running_loop()
        frames = Frames()
        try:
            while not delivery.done() and (data := await reader.read(_READ_BYTES)):
                for piece, is_message in frames.feed(data):
                    due = loop.time() + self._meddler.meddling.delay_seconds
                    for each in self._meddler.fate(piece) if is_message else [piece]:
                        late.put_nowait((due, each))
            late.put_nowait(None)
            await delivery
        except OSError:
            return
        finally:
            delivery.cancel()

    async def _deliver(self, late: "asyncio.Queue[tuple[float, bytes] | None]", writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while (each := await late.get()) is not None:
            due, frame = each
            await asyncio.sleep(max(0.0, due - loop.time()))
            await self._flows.wait()
            writer.write(frame)
            await writer.drain()


async def _main(seed: int, listen: _Address, upstream: _Address) -> None:
    proxy = _Proxy(seed, listen, upstream)
    running = asyncio.create_task(proxy.run())
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    print("ready", flush=True)
    decoder = msgspec.json.Decoder(Meddling)
    while line := await orders.readline():
        proxy.obey(decoder.decode(line))
        print(msgspec.json.encode(proxy.hits).decode(), flush=True)
    running.cancel()


def _address(text: str) -> _Address:
    host, _, port = text.rpartition(":")
    return host, int(port)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), _address(sys.argv[2]), _address(sys.argv[3])))
