"""Commands about a prefill that wait for the accelerator, and those that must not overtake them."""

from collections import deque
from collections.abc import Iterator

from kvberth.mover.commands import AdvancePrefill, PrefillCommand
from kvberth.protocol import TransferKey

__all__ = ["FencedCommands"]


class FencedCommands:
    """One queue per request, so that one's fence holds up nobody else. Used by the mover's thread only."""

    def __init__(self) -> None:
        self._queues: dict[tuple[TransferKey, ...], deque[PrefillCommand]] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def hold(self, command: PrefillCommand) -> bool:
        """Keep a command whose fence is not done, or which comes behind one; False for a command that may go on."""
        queue = self._queues.get(command.keys)
        if queue is None:
            if _may_pass(command):
                return False
            queue = self._queues[command.keys] = deque()
        queue.append(command)
        return True

    def passed(self) -> Iterator[PrefillCommand]:
        """The commands that may go on now, in the order of each request."""
        for keys, queue in list(self._queues.items()):
            while queue and _may_pass(queue[0]):
                yield queue.popleft()
            if not queue:
                del self._queues[keys]


def _may_pass(command: PrefillCommand) -> bool:
    return not isinstance(command, AdvancePrefill) or command.fence is None or command.fence.query()
