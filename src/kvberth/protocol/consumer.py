"""The consumer's side of transfers: what D waits for, and when its blocks are safe.

    WAITING ──peer ready──> REGISTERED ──accepted──> ACCEPTED ──writing──> RECEIVING ──ended──> ENDED         (push)
                              ACCEPTED ──located──> READING ──reads done──> CONFIRMING ──ended──> ENDED  (pull)

The engine's request waits, with its blocks reserved, until `ReportReceived`. That is given out exactly once, and never
while a WRITE of the producer or a READ of ours may still touch the blocks: an abort or a deadline first asks the
producer to be quiet (CANCELLING) or waits for our own READs (DRAINING). Only a producer that is lost needs no answer;
the driver tells of the loss when the producer, too, has given up.

Whether what was READ is the KV, only the producer knows: it may have given up on us, or its engine may have taken the
blocks away. So a READ is reported when the producer has confirmed (CONFIRMING) that it held the blocks until `Done`.

The module is long because a machine is one thing: handlers that were apart would have to be read side by side.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvberth.layout import block_range, num_blocks_for, units_of
from kvberth.protocol.actions import Action, EndRecord, ReportReceived, SendMessage, StartRead, StopPosting
from kvberth.protocol.consumer_states import CONSUMER_TABLE, ConsumerState
from kvberth.protocol.deadlines import Deadlines
from kvberth.protocol.ends import End, Reason
from kvberth.protocol.events import (
    ConsumerEvent,
    DeadlineReached,
    PeerLost,
    PeerReady,
    PeerRefused,
    ReadsDone,
    ReadsFailed,
    RequestAborted,
    RequestDeclined,
    RequestWaiting,
)
from kvberth.protocol.ids import PeerName, Role, TransferKey, TransferMode
from kvberth.protocol.messages import Accepted, Cancel, Done, Ended, Located, Quiesced, Register, Writing
from kvberth.protocol.peers import KeysByPeer
from kvberth.protocol.table import allowed_targets, check_target
from kvberth.protocol.timeline import PrefillTimes, Timeline
from kvberth.protocol.timing import Timing

__all__ = ["Consumer"]

_S = ConsumerState

_PEER_MESSAGES = (Accepted, Writing, Located, Ended, Quiesced)


@dataclass(slots=True)
class _Transfer:
    """Everything that D knows about one transfer."""

    key: TransferKey
    started: float
    state: ConsumerState = ConsumerState.NEW
    request: RequestWaiting | None = None
    attempt: int = 0
    is_engine_waiting: bool = False
    peer: PeerName | None = None
    end: End = End.CANCELLED
    reason: Reason = Reason.NONE
    detail: str = ""
    num_bytes: int = 0
    num_descriptors: int = 0
    reserved_block_seconds: float = 0.0
    deadline: float | None = None
    registered_at: float | None = None
    accepted_at: float | None = None
    moving_at: float | None = None
    prefill: tuple[float, PrefillTimes] | None = None
    actions: list[Action] = field(default_factory=list)

    def tell_prefill(self, times: PrefillTimes | None, now: float) -> None:
        """P's times have arrived."""
        if times is not None:
            self.prefill = now, times

    def timeline(self, now: float) -> Timeline:
        """The wait, should it end now."""
        at, times = self.prefill or (0.0, None)
        origin = at - self.started
        return Timeline(
            registered=self._since_start(self.registered_at),
            accepted=self._since_start(self.accepted_at),
            prefill_announced=origin - times.announced if times else None,
            moving=self._since_start(self.moving_at),
            prefill_done=origin - times.done if times else None,
            ended=now - self.started,
            writes=tuple((origin - age, num_blocks) for age, num_blocks in times.writes) if times else (),
        )

    def _since_start(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.started


class Consumer:
    """All transfers of one rank in the role of consumer. No I/O, no clock; used by one thread.

    A transfer is forgotten as soon as it has ended: what arrives for it later is stale by definition, and ignored. Only
    its name is remembered, for longer than the producer knows how it ended: messages tell requests apart by nothing
    else, and a second one of the same name must not be given the end, or the bytes, of the first.

    Args:
        block_size: tokens per block.
        timing: deadlines.
    """

    def __init__(self, block_size: int, timing: Timing) -> None:
        self._block_size = block_size
        self._timing = timing
        self._transfers: dict[TransferKey, _Transfer] = {}
        self._deadlines = Deadlines()
        self._counts: Counter[ConsumerState] = Counter()
        self._keys_of_peer = KeysByPeer()
        self._used: OrderedDict[tuple[TransferKey, int], float] = OrderedDict()  # in the order of their ends

    # What the driver asks.

    def state(self, key: TransferKey) -> ConsumerState | None:
        """The state of a transfer; None once it has ended."""
        transfer = self._transfers.get(key)
        return transfer.state if transfer else None

    def count(self, state: ConsumerState) -> int:
        """How many transfers are in a state."""
        return self._counts[state]

    def has_live(self, peer: PeerName) -> bool:
        """Whether we wait for anything from this peer."""
        return peer in self._keys_of_peer

    def is_of_another(self, key: TransferKey, peer: PeerName | None) -> bool:
        """Whether this transfer is live and not with this peer, which has nothing to say of it then."""
        transfer = self._transfers.get(key)
        return transfer is not None and transfer.peer is not None and transfer.peer != peer

    def live_with(self, peer: PeerName) -> tuple[tuple[TransferKey, int], ...]:
        """What we wait for from this peer, for the heartbeat."""
        return tuple((key, self._transfers[key].attempt) for key in self._keys_of_peer.of(peer))

    def unanswered(self, peer: PeerName) -> tuple[TransferKey, ...]:
        """Registrations that this peer has not answered, and may never have seen."""
        return tuple(key for key, _ in self.live_with(peer) if self._transfers[key].state is _S.REGISTERED)

    def awaits_peer(self, key: TransferKey) -> bool:
        """Whether the transfer can go on when its producer is ready."""
        return self.state(key) in {_S.WAITING, _S.DECLINING}

    def next_deadline(self) -> float | None:
        """When `fire` should be called next."""
        return self._deadlines.next()

    # What the driver tells.

    def handle(self, key: TransferKey, event: ConsumerEvent, now: float) -> list[Action]:
        """One event of one transfer. A message of another attempt, or for a transfer that is over, does nothing.

        Raises:
            UnexpectedEvent: the table has no such step.
        """
        transfer = self._transfers.get(key)
        if transfer is None:
            if not isinstance(event, RequestWaiting | RequestDeclined):
                return []
            transfer = self._transfers[key] = _Transfer(key, now)
        if isinstance(event, _PEER_MESSAGES):
            if event.attempt != transfer.attempt or (transfer.state, type(event)) not in CONSUMER_TABLE:
                return []
        elif isinstance(event, PeerLost) and transfer.peer != event.peer:
            return []
        before = transfer.state
        targets = allowed_targets(CONSUMER_TABLE, key, before, event)
        _HANDLERS[type(event)](self, transfer, event, now)
        check_target(targets, key, event, transfer.state)
        self._counts[before] -= before is not _S.NEW
        self._counts[transfer.state] += transfer.state is not _S.ENDED
        if transfer.state is _S.ENDED:
            del self._transfers[key]
            self._deadlines.set(key, None)
        else:
            self._deadlines.set(key, transfer.deadline)
        actions, transfer.actions = transfer.actions, []
        return actions

    def fire(self, now: float) -> list[Action]:
        """Everything whose deadline has passed."""
        actions: list[Action] = []
        for key in self._deadlines.take_due(now):
            self._transfers[key].deadline = None
            actions += self.handle(key, DeadlineReached(now), now)
        return actions

    def lose_peer(self, peer: PeerName, detail: str, now: float) -> list[Action]:
        """The peer is gone, and so late that it has stopped to write to us, whether it lives or not."""
        actions: list[Action] = []
        for key, _ in self.live_with(peer):
            actions += self.handle(key, PeerLost(peer, detail), now)
        return actions

    def repeat_cancels(self, peer: PeerName) -> list[Action]:
        """A `Cancel` or its answer may have been lost with a connection: ask again, with each heartbeat."""
        return [
            SendMessage(peer, Cancel(key, attempt, self._transfers[key].reason))
            for key, attempt in self.live_with(peer)
            if self._transfers[key].state is _S.CANCELLING
        ]

    # Handlers: one per event; each leaves `transfer` in its next state.

    def _on_waiting(self, transfer: _Transfer, event: RequestWaiting, now: float) -> None:
        transfer.request, transfer.attempt, transfer.is_engine_waiting = event, event.attempt, True
        transfer.end, transfer.reason = End.CANCELLED, Reason.NONE
        transfer.deadline = now + self._timing.deadline_seconds
        if self._used.get((transfer.key, event.attempt), now) > now:
            self._give_up_unregistered(transfer, End.FAILED, Reason.ID_REUSED, now)
        else:
            transfer.state = _S.WAITING

    def _on_declined(self, transfer: _Transfer, event: RequestDeclined, now: float) -> None:
        if transfer.state not in {_S.NEW, _S.DECLINING}:
            return  # the request itself decides
        transfer.attempt, transfer.reason = event.attempt, event.reason
        transfer.end = End.COMPLETED if event.reason is Reason.NOT_NEEDED else End.CANCELLED
        transfer.deadline = now + self._timing.deadline_seconds
        transfer.state = _S.DECLINING

    def _on_peer_ready(self, transfer: _Transfer, event: PeerReady, now: float) -> None:
        self._keys_of_peer.untie(transfer.peer, transfer.key)
        transfer.peer = event.peer
        self._keys_of_peer.tie(event.peer, transfer.key)
        if transfer.state is _S.DECLINING:
            cancel = Cancel(transfer.key, transfer.attempt, transfer.reason)
            transfer.actions.append(SendMessage(event.peer, cancel))
            self._finish(transfer, now)
            return
        request = transfer.request
        assert request is not None
        transfer.state = _S.REGISTERED
        transfer.registered_at = now
        register = Register(
            key=transfer.key,
            attempt=request.attempt,
            mode=request.mode,
            first_token=request.first_token,
            num_tokens=request.num_tokens,
            prompt_digest=request.prompt_digest,
            block_size=self._block_size,
            blocks=request.blocks if request.mode is TransferMode.PUSH else (),
        )
        transfer.actions.append(SendMessage(event.peer, register))

    def _on_peer_refused(self, transfer: _Transfer, event: PeerRefused, now: float) -> None:
        if transfer.state is not _S.DECLINING:
            transfer.end, transfer.reason, transfer.detail = End.FAILED, event.reason, event.detail
        self._finish(transfer, now)

    def _on_accepted(self, transfer: _Transfer, event: Accepted, now: float) -> None:
        if transfer.state is _S.REGISTERED:
            transfer.state = _S.ACCEPTED
            transfer.accepted_at = now

    def _on_writing(self, transfer: _Transfer, event: Writing, now: float) -> None:
        if transfer.state is not _S.CANCELLING:
            transfer.state = _S.RECEIVING
            transfer.moving_at = transfer.moving_at or now

    def _on_located(self, transfer: _Transfer, event: Located, now: float) -> None:
        if transfer.state is _S.CONFIRMING:  # our `Done` was lost
            self._send_done(transfer)
        if transfer.state not in {_S.REGISTERED, _S.ACCEPTED}:
            return
        request = transfer.request
        assert request is not None
        assert transfer.peer is not None
        unit = min(self._block_size, event.block_size)
        needed = num_blocks_for(request.num_tokens, event.block_size) - request.first_token // event.block_size
        if len(event.blocks) != needed:
            detail = f"the prefill worker offers {len(event.blocks)} blocks of {event.block_size}, {needed} are needed"
            self._cancel(transfer, End.FAILED, Reason.INVALID_BLOCKS, detail)
            return
        start, stop = block_range(request.first_token, request.num_tokens, unit)
        skipped = request.first_token % event.block_size // unit
        local = units_of(request.blocks, self._block_size // unit, 0, stop - start)
        remote = units_of(event.blocks, event.block_size // unit, skipped, skipped + stop - start)
        transfer.state = _S.READING
        transfer.moving_at = now
        transfer.tell_prefill(event.times, now)
        transfer.actions.append(StartRead(transfer.key, transfer.peer, local, remote))

    def _on_ended(self, transfer: _Transfer, event: Ended, now: float) -> None:
        """The producer's end is ours too, unless we had given up before."""
        if transfer.state is _S.READING:
            # P let go of its blocks while we read them: what has been read is worthless.
            self._drain(transfer, End.FAILED, event.reason, event.detail)
        elif transfer.state is not _S.DRAINING:
            if transfer.state is not _S.CANCELLING:
                transfer.end, transfer.reason, transfer.detail = event.end, event.reason, event.detail
            if transfer.state not in {_S.CANCELLING, _S.CONFIRMING}:
                transfer.num_bytes, transfer.num_descriptors = event.num_bytes, event.num_descriptors
                transfer.tell_prefill(event.times, now)
            self._finish(transfer, now)

    def _on_quiesced(self, transfer: _Transfer, event: Quiesced, now: float) -> None:
        self._finish(transfer, now)

    def _on_aborted(self, transfer: _Transfer, event: RequestAborted, now: float) -> None:
        if transfer.state is _S.WAITING:
            self._give_up_unregistered(transfer, End.CANCELLED, Reason.CONSUMER_GONE, now)
        elif transfer.state is _S.READING:
            self._drain(transfer, End.CANCELLED, Reason.CONSUMER_GONE, "")
        elif transfer.state is _S.CONFIRMING:
            self._give_up(transfer, End.CANCELLED, Reason.CONSUMER_GONE, "", now)
        elif transfer.state in {_S.REGISTERED, _S.ACCEPTED, _S.RECEIVING}:
            self._cancel(transfer, End.CANCELLED, Reason.CONSUMER_GONE, "")

    def _on_deadline(self, transfer: _Transfer, event: DeadlineReached, now: float) -> None:
        detail = f"waited {now - transfer.started:.1f} s"
        if transfer.state in {_S.WAITING, _S.DECLINING}:
            transfer.end, transfer.reason, transfer.detail = End.FAILED, Reason.DEADLINE, detail
            self._finish(transfer, now)
        elif transfer.state is _S.READING:
            self._drain(transfer, End.FAILED, Reason.DEADLINE, detail)
        elif transfer.state is _S.CONFIRMING:
            self._give_up(transfer, End.FAILED, Reason.DEADLINE, detail, now)
        else:
            self._cancel(transfer, End.FAILED, Reason.DEADLINE, detail)

    def _on_peer_lost(self, transfer: _Transfer, event: PeerLost, now: float) -> None:
        if transfer.state is _S.READING:
            self._drain(transfer, End.FAILED, Reason.PEER_LOST, event.detail)
        elif transfer.state is not _S.DRAINING:
            if transfer.state is not _S.CANCELLING:
                transfer.end, transfer.reason, transfer.detail = End.FAILED, Reason.PEER_LOST, event.detail
            self._finish(transfer, now)

    def _on_reads_over(self, transfer: _Transfer, event: ReadsDone | ReadsFailed, now: float) -> None:
        if transfer.state is _S.DRAINING:
            self._give_up(transfer, transfer.end, transfer.reason, transfer.detail, now)
        elif isinstance(event, ReadsFailed):
            self._give_up(transfer, End.FAILED, Reason.TRANSPORT, event.detail, now)
        else:
            transfer.num_bytes, transfer.num_descriptors = event.num_bytes, event.num_descriptors
            transfer.state = _S.CONFIRMING
            self._send_done(transfer)

    # Steps that several handlers take.

    def _send_done(self, transfer: _Transfer) -> None:
        assert transfer.peer is not None
        transfer.actions.append(SendMessage(transfer.peer, Done(transfer.key, transfer.attempt)))

    def _give_up(self, transfer: _Transfer, end: End, reason: Reason, detail: str, now: float) -> None:
        """Nothing is in flight: end at once, and let the producer know."""
        assert transfer.peer is not None
        transfer.end, transfer.reason, transfer.detail = end, reason, detail
        transfer.actions.append(SendMessage(transfer.peer, Cancel(transfer.key, transfer.attempt, reason)))
        self._finish(transfer, now)

    def _cancel(self, transfer: _Transfer, end: End, reason: Reason, detail: str) -> None:
        """Give up; the end comes when the producer is quiet, or lost."""
        assert transfer.peer is not None
        transfer.end, transfer.reason, transfer.detail = end, reason, detail
        transfer.deadline = None
        transfer.state = _S.CANCELLING
        transfer.actions.append(SendMessage(transfer.peer, Cancel(transfer.key, transfer.attempt, reason)))

    def _give_up_unregistered(self, transfer: _Transfer, end: End, reason: Reason, now: float) -> None:
        """P does not know our blocks, so they are free at once; P still has to hear that nobody wants its own."""
        self._report(transfer, now, ok=False, reason=reason)
        transfer.end, transfer.reason = end, reason
        transfer.state = _S.DECLINING

    def _drain(self, transfer: _Transfer, end: End, reason: Reason, detail: str) -> None:
        """Give up; the end comes when our own READs are over."""
        transfer.end, transfer.reason, transfer.detail = end, reason, detail
        transfer.deadline = None
        transfer.state = _S.DRAINING
        transfer.actions.append(StopPosting(transfer.key))

    def _report(self, transfer: _Transfer, now: float, *, ok: bool, reason: Reason) -> None:
        if transfer.is_engine_waiting:
            assert transfer.request is not None
            transfer.is_engine_waiting = False
            timeline = transfer.timeline(now)
            transfer.reserved_block_seconds = len(transfer.request.blocks) * timeline.ended
            report = ReportReceived(transfer.request.request_id, ok, reason, transfer.detail, timeline)
            transfer.actions.append(report)

    def _finish(self, transfer: _Transfer, now: float) -> None:
        """The one end of a transfer."""
        transfer.state = _S.ENDED
        self._remember(transfer, now)
        self._keys_of_peer.untie(transfer.peer, transfer.key)
        self._report(transfer, now, ok=transfer.end is End.COMPLETED, reason=transfer.reason)
        mode = transfer.request.mode if transfer.request else None
        seconds = now - transfer.started
        moved = (transfer.num_bytes, transfer.num_descriptors)
        end = (transfer.end, transfer.reason, transfer.detail)
        after_prefill = transfer.timeline(now).after_prefill if transfer.end is End.COMPLETED else None
        costs = (transfer.reserved_block_seconds, after_prefill)
        record = EndRecord(Role.CONSUMER, transfer.key, mode, *end, *moved, seconds, *costs)
        transfer.actions.append(record)

    def _remember(self, transfer: _Transfer, now: float) -> None:
        """For twice as long as a producer does: it may end later than we, by its lease at most."""
        while self._used and next(iter(self._used.values())) <= now:
            self._used.popitem(last=False)
        name = transfer.key, transfer.attempt
        self._used[name] = now + 2 * self._timing.memory_seconds
        self._used.move_to_end(name)


_Handler = Callable[[Consumer, _Transfer, Any, float], None]

_HANDLERS: dict[type[Any], _Handler] = {
    RequestWaiting: Consumer._on_waiting,
    RequestDeclined: Consumer._on_declined,
    RequestAborted: Consumer._on_aborted,
    PeerReady: Consumer._on_peer_ready,
    PeerRefused: Consumer._on_peer_refused,
    PeerLost: Consumer._on_peer_lost,
    Accepted: Consumer._on_accepted,
    Writing: Consumer._on_writing,
    Located: Consumer._on_located,
    Ended: Consumer._on_ended,
    Quiesced: Consumer._on_quiesced,
    ReadsDone: Consumer._on_reads_over,
    ReadsFailed: Consumer._on_reads_over,
    DeadlineReached: Consumer._on_deadline,
}
