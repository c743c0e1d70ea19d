"""The two queues between the engine's threads and the mover's."""

import os
import threading
from collections import deque

from kvberth.mover.commands import Command
from kvberth.mover.results import Results, TransferReport
from kvberth.protocol import ReportReceived
from kvberth.protocol.ids import RequestId

__all__ = ["Inbox", "Outbox"]


class Inbox:
    """Commands on their way to the mover; a file descriptor wakes it."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()  # append and popleft are atomic: no lock
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable while the mover has not looked since the last `put` or `wake`."""
        return self._event

    def put(self, command: Command) -> None:
        """Any thread."""
        self._commands.append(command)
        self.wake()

    def wake(self) -> None:
        """Any thread: let the mover look around."""
        os.eventfd_write(self._event, 1)

    def __len__(self) -> int:
        """Commands that the mover has not taken."""
        return len(self._commands)

    def take(self) -> list[Command]:
        """The mover's thread: everything that has arrived, in order."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        taken = []
        while self._commands:
            taken.append(self._commands.popleft())
        return taken

    def close(self) -> None:
        """After the mover's thread has ended."""
        os.close(self._event)


class Outbox:
    """Results on their way to the engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects _results
        self._results = Results()
        self._has_news = threading.Event()

    def released(self, request_id: RequestId) -> None:
        """The mover's thread."""
        with self._lock:
            self._results.released.add(request_id)
        self._has_news.set()

    def received(self, report: ReportReceived) -> None:
        """The mover's thread."""
        with self._lock:
            self._results.received.append(report)
        self._has_news.set()

    def report(self, report: TransferReport) -> None:
        """The mover's thread."""
        with self._lock:
            self._results.reports.append(report)
        self._has_news.set()

    def heartbeat_missed(self) -> None:
        """The mover's thread."""
        with self._lock:
            self._results.heartbeats_missed += 1

    def queued(self, count: int) -> None:
        """The mover's thread: how much waits for it now."""
        with self._lock:
            self._results.num_queued = count

    def take(self, wait_seconds: float = 0.0) -> Results:
        """The engine's thread: what has come out since the last call; if nothing has, wait a little for it."""
        if wait_seconds:
            self._has_news.wait(wait_seconds)
        self._has_news.clear()
        with self._lock:
            taken, self._results = self._results, Results(num_queued=self._results.num_queued)
        return taken
