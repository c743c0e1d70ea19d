"""The thread that owns the transport and the control channel of one rank."""

import logging
import threading
import time
from collections.abc import Callable

from kvberth.keys import Keyring
from kvberth.mover.channel import Channel
from kvberth.mover.commands import Command
from kvberth.mover.core import Core
from kvberth.mover.inbox import Inbox, Outbox
from kvberth.mover.results import Results
from kvberth.protocol import EngineCard, Timing
from kvberth.transport import Transport

__all__ = ["Mover", "MoverFailed"]

_log = logging.getLogger(__name__)


class MoverFailed(RuntimeError):
    """The mover's thread has ended with an error; the engine cannot hand over KV any more."""


class Mover:
    """Starts, watches and stops the thread. All methods belong to the engine's thread.

    Args:
        make_transport: called on the mover's thread, which then owns the result; its memory is registered there too.
        make_card: makes what peers are told, given the transport's metadata.
        listen: `(host, port)` to accept consumers at; None for an engine that is a consumer only.
        timing: leases, deadlines, heartbeats.
        keyring: our keys and the accepted peers', which the mover's thread then owns; None accepts everybody.
    """

    def __init__(
        self,
        make_transport: Callable[[], Transport],
        make_card: Callable[[bytes], EngineCard],
        listen: tuple[str, int] | None,
        timing: Timing,
        keyring: Keyring | None = None,
    ) -> None:
        self._make_transport = make_transport
        self._make_card = make_card
        self._listen = listen
        self._timing = timing
        self._keyring = keyring
        self._inbox = Inbox()
        self._outbox = Outbox()
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._step_began: float | None = None  # written by the engine's thread, read by the mover's
        self._thread = threading.Thread(target=self._run, name="kvberth-mover", daemon=True)

    def start(self, timeout_seconds: float = 60.0) -> None:
        """Start the thread and wait until it can work.

        Raises:
            MoverFailed: it could not start: the port is taken, the transport cannot be made, the memory cannot be
                registered. The cause is chained.
        """
        self._thread.start()
        if not self._ready.wait(timeout_seconds):
            raise MoverFailed(f"the mover was not ready within {timeout_seconds:g} s")
        self._raise_failure()

    def begin_step(self) -> None:
        """The engine begins a step: what has arrived for it by now has been submitted, or is about to be."""
        self._step_began = time.monotonic()

    def end_step(self) -> None:
        """The engine has ended its step, and begins the next one as soon as something arrives for it."""
        self._step_began = None

    def submit(self, command: Command) -> None:
        """Hand a command over; returns at once.

        Raises:
            MoverFailed: nobody will carry it out.
        """
        self._raise_failure()
        if self._stopping.is_set():
            raise MoverFailed("the kvberth mover is stopped")
        self._inbox.put(command)

    def take(self, wait_seconds: float = 0.0) -> Results:
        """What has come out since the last call; if nothing has, wait for up to `wait_seconds`.

        Raises:
            MoverFailed: the thread has ended with an error.
        """
        self._raise_failure()
        return self._outbox.take(wait_seconds)

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Stop the thread and wait for its end. Safe to call twice."""
        if not self._thread.is_alive():
            return
        self._stopping.set()
        self._inbox.wake()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            _log.error("kvberth: the mover did not stop within %g s", timeout_seconds)
        else:
            self._inbox.close()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise MoverFailed(f"the kvberth mover failed: {self._failure}") from self._failure

    def _run(self) -> None:
        """The thread's outermost frame: whatever is raised below becomes the engine's failure."""
        channel = Channel(self._keyring)
        try:
            transport = self._make_transport()
            try:
                if self._listen is not None:
                    channel.listen(*self._listen)
                card = self._make_card(transport.metadata())
                core = Core(card, transport, channel, self._outbox, self._timing)
                channel.watch(self._inbox.fileno())
                self._ready.set()
                self._work(core, channel)
                core.close(time.monotonic())
            finally:
                transport.close()
        except BaseException as error:
            _log.exception("kvberth: the mover failed")
            self._failure = error
        finally:
            channel.close()
            self._ready.set()

    def _work(self, core: Core, channel: Channel) -> None:
        while not self._stopping.is_set():
            now = time.monotonic()
            channel.wait(core.next_wakeup(now), now)
            now = time.monotonic()
            # The engine's commands are taken last and carried out first: one that takes blocks away was given before
            # they could be overwritten, and so before anything of that could land or be read.
            core.look(now)
            channel.admit(now)
            from_clients = list(channel.from_clients(now))
            from_servers = list(channel.from_servers(now))
            for command in self._inbox.take():
                core.command(command, now)
            for route, frame, sender in from_clients:
                core.frame_from_client(route, frame, now, sender)
            for address, frame in from_servers:
                core.frame_from_server(address, frame, now)
            for route in channel.revoked_clients():
                core.client_revoked(route, now)
            if channel.has_broken_clients(now):
                core.clients_broke(now)
            for address in channel.broken_servers():
                core.server_broke(address, now)
            for address in channel.denying_servers():
                core.server_denies(address, now)
            for address in channel.cutting_servers():
                core.server_cuts_short(address)
            for address in channel.refusing_servers():
                core.server_refuses(address, now)
            core.turn(time.monotonic(), self._step_began)
            self._outbox.queued(len(self._inbox) + core.num_waiting())
