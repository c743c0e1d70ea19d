"""The producer's side of transfers: what P knows, and what it does next.

    absent ──announced──> COMPUTING ──────── finished ──────> HELD ──────────┐ registered
       │                      │ registered                                   │
       └──registered──> REGISTERED ──announced──> MATCHED ──complete──> WRITING or READING ──> ENDED
                                                     │ some blocks ready     ↑ the last ones
                                                     └────> STREAMING ───────┘

A push begins as soon as the first blocks are ready (STREAMING), and ends with those that complete the prompt (WRITING).
What must not be posted any more is drained first (DRAINING), whatever comes then.

A consumer that gives up, dies or is superseded by a newer attempt ends its *binding*, not the transfer: P keeps the
blocks (COMPUTING or HELD) for an attempt that may follow, for `rebind_seconds` once the prompt is computed, and ends as
the last binding did if none comes.

One `_Transfer` per key owns everything about it. The table below names every (state, event) that can happen; the
handlers decide which of its targets is taken. An ended transfer is remembered for a while, so that a message that
comes late, or again, gets the true answer.

The module is long because a machine is one thing: handlers that were apart would have to be read side by side.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from kvberth.layout import block_range, num_blocks_for, units_of
from kvberth.protocol.actions import (
    Action,
    EndRecord,
    ReleaseRequest,
    SendMessage,
    StartWrite,
    StopPosting,
)
from kvberth.protocol.claims import Claims
from kvberth.protocol.deadlines import Deadlines
from kvberth.protocol.ends import End, Reason
from kvberth.protocol.events import (
    CancelReceived,
    DeadlineReached,
    DoneReceived,
    PeerLost,
    PrefillAborted,
    PrefillAdvanced,
    PrefillAnnounced,
    PrefillFinished,
    PrefillRestarted,
    ProducerEvent,
    RegisterReceived,
    StatusAsked,
    WritesDone,
    WritesFailed,
)
from kvberth.protocol.ids import PeerName, RequestId, Role, TransferKey, TransferMode
from kvberth.protocol.messages import Accepted, Ended, Located, Quiesced, Register, Writing
from kvberth.protocol.peers import KeysByPeer
from kvberth.protocol.producer_states import PRODUCER_TABLE, ProducerState
from kvberth.protocol.table import allowed_targets, check_target
from kvberth.protocol.timeline import PrefillTimes
from kvberth.protocol.timing import Timing

__all__ = ["Producer"]

_S = ProducerState

_DENIALS_KEPT = 1024
"""Above this number, denials whose time is over are dropped when one is added."""


class _After(Enum):
    """What comes when nothing is in flight any more."""

    CANCEL = auto()
    PEER_LOST = auto()
    ABORT = auto()
    RESTART = auto()
    REBIND = auto()
    PREEMPTED = auto()


@dataclass(slots=True)
class _Transfer:
    """Everything that P knows about one transfer.

    Attributes:
        ready: blocks whose KV is in memory, from the prompt's first on; all of them when `is_complete`.
        num_written: how many of the registration's blocks have been given to the transport, in units of the smaller of
            the two engines' blocks.
        after: what comes after DRAINING.
        pending: the registration that takes over when nothing of the current one is in flight.
        unbound: how the last binding ended, and so the transfer if no other follows.
        highest_attempt: of those that were heard of; older ones are superseded.
        announced_at, done_at: when the request came, and when its KV was complete.
        writes: when parts of the current registration's blocks were given to the transport, and how many blocks.
        times: as they were at the end.
        claimed: the registration, and the one that takes over, whose blocks no other transfer may have.
    """

    key: TransferKey
    started: float
    state: ProducerState = ProducerState.NEW
    request_id: RequestId | None = None
    num_tokens: int = 0
    prompt_digest: bytes = b""
    ready: list[int] = field(default_factory=list)
    is_complete: bool = False
    num_written: int = 0
    after: _After | None = None
    pending: tuple[Register, PeerName] | None = None
    unbound: tuple[End, Reason, str] | None = None
    highest_attempt: int = 0
    registration: Register | None = None
    peer: PeerName | None = None
    registered_at: float = 0.0
    announced_at: float = 0.0
    done_at: float | None = None
    writes: list[tuple[float, int]] = field(default_factory=list)
    times: PrefillTimes | None = None
    end: End | None = None
    reason: Reason = Reason.NONE
    detail: str = ""
    num_bytes: int = 0
    num_descriptors: int = 0
    is_engine_done: bool = False
    deadline: float | None = None
    claimed: tuple[Register | None, Register | None] = (None, None)
    actions: list[Action] = field(default_factory=list)

    def is_registered_by(self, peer: PeerName, attempt: int) -> bool:
        """Whether the current registration is this attempt of this peer."""
        return self.peer == peer and self.registration is not None and self.registration.attempt == attempt

    def is_pending_for(self, peer: PeerName, attempt: int) -> bool:
        """Whether this attempt of this peer is the one that takes over."""
        return self.pending is not None and (self.pending[1], self.pending[0].attempt) == (peer, attempt)

    def mark_ready(self, blocks: list[int], now: float, *, is_complete: bool) -> None:
        """These blocks, from the prompt's first on, are in memory."""
        self.ready, self.is_complete = blocks, is_complete
        self.done_at = (self.done_at or now) if is_complete else None

    def forget_writes(self) -> None:
        """Nothing of the registration's blocks counts as written."""
        self.num_written = 0
        self.writes.clear()

    def times_at(self, now: float) -> PrefillTimes | None:
        """What the prefill took, seen from now; None before it is complete."""
        if self.done_at is None:
            return None
        writes = tuple((now - moment, num_blocks) for moment, num_blocks in self.writes)
        return PrefillTimes(now - self.announced_at, now - self.done_at, writes)

    def attempt_of(self, peer: PeerName) -> int | None:
        """The attempt that this peer waits for; None if it does not."""
        if self.pending is not None and self.pending[1] == peer:
            return self.pending[0].attempt
        return self.registration.attempt if self.registration is not None and self.peer == peer else None


class Producer:
    """All transfers of one rank in the role of producer. No I/O, no clock; used by one thread.

    Args:
        block_size: tokens per block.
        timing: leases and deadlines.
    """

    def __init__(self, block_size: int, timing: Timing) -> None:
        self._block_size = block_size
        self._timing = timing
        self._transfers: dict[TransferKey, _Transfer] = {}
        self._deadlines = Deadlines()
        self._keys_of_request: dict[RequestId, set[TransferKey]] = {}
        self._keys_of_peer = KeysByPeer()
        self._claims = Claims()
        self._counts: Counter[ProducerState] = Counter()
        self._denied: dict[TransferKey, dict[tuple[PeerName, int], float]] = {}
        self._forget_denials_at = _DENIALS_KEPT

    # What the driver asks.

    def state(self, key: TransferKey) -> ProducerState | None:
        """The state of a transfer; None if nothing is known of it."""
        transfer = self._transfers.get(key)
        return transfer.state if transfer else None

    def has_live(self, peer: PeerName) -> bool:
        """Whether this peer waits for anything."""
        return peer in self._keys_of_peer

    def count(self, state: ProducerState) -> int:
        """How many transfers are in a state."""
        return self._counts[state]

    def progress(self, key: TransferKey) -> tuple[int, int, bool]:
        """Tokens of the prompt, tokens whose KV is in memory, whether a consumer is registered; zeros if unknown."""
        transfer = self._transfers.get(key)
        if transfer is None or transfer.end is not None:
            return 0, 0, False
        done = min(len(transfer.ready) * self._block_size, transfer.num_tokens)
        return transfer.num_tokens, done, transfer.registration is not None

    def next_deadline(self) -> float | None:
        """When `fire` should be called next."""
        return self._deadlines.next()

    # What the driver tells.

    def handle(self, key: TransferKey, event: ProducerEvent, now: float) -> list[Action]:
        """One event of one transfer.

        Raises:
            UnexpectedEvent: the table has no such step; a bug on our side, never the peer's doing.
        """
        transfer = self._transfers.get(key)
        if transfer is None:
            transfer = _Transfer(key, now)
        before = transfer.state
        targets = allowed_targets(PRODUCER_TABLE, key, before, event)
        _HANDLERS[type(event)](self, transfer, event, now)
        check_target(targets, key, event, transfer.state)
        self._claim(transfer)
        self._counts[before] -= before is not _S.NEW
        if transfer.state is _S.NEW or (before is _S.ENDED and self._is_forgotten(transfer, event)):
            self._transfers.pop(key, None)
            self._deadlines.set(key, None)
        else:
            self._counts[transfer.state] += 1
            self._transfers[key] = transfer
            self._deadlines.set(key, transfer.deadline)
        actions, transfer.actions = transfer.actions, []
        return actions

    def fire(self, now: float, last_look: float) -> list[Action]:
        """Everything whose deadline has passed: all of it, on the tick on which it passed.

        Args:
            now: the time.
            last_look: when the engine last took in new requests; `now` for an engine that is idle.
        """
        actions: list[Action] = []
        for key in self._deadlines.take_due(now):
            self._transfers[key].deadline = None
            actions += self.handle(key, DeadlineReached(last_look), now)
        return actions

    def lose_peer(self, peer: PeerName, detail: str, now: float) -> list[Action]:
        """The peer is gone; so are its registrations."""
        actions: list[Action] = []
        for key in self._keys_of_peer.of(peer):
            actions += self.handle(key, PeerLost(peer, detail), now)
        return actions

    def heard_live(self, peer: PeerName, live: tuple[tuple[TransferKey, int], ...], now: float) -> list[Action]:
        """A heartbeat's list: answer anew what it waits for, end what it no longer waits for.

        A registration that is younger than one heartbeat may have crossed the list on the way and is left alone.
        """
        actions: list[Action] = []
        for key, attempt in live:
            actions += self.handle(key, StatusAsked(peer, attempt), now)
        named = {key for key, _ in live}
        for key in self._keys_of_peer.of(peer):
            if key in named:
                continue
            transfer = self._transfers[key]
            awaited = transfer.attempt_of(peer)
            if awaited is not None and now - transfer.registered_at > self._timing.heartbeat_seconds:
                actions += self.handle(key, CancelReceived(peer, awaited, Reason.CONSUMER_GONE), now)
        return actions

    # Handlers: one per event; each leaves `transfer` in its next state.

    def _on_announced(self, transfer: _Transfer, event: PrefillAnnounced, now: float) -> None:
        transfer.request_id = event.request_id
        transfer.is_engine_done = False  # it was with an earlier request of the same name, whose end is remembered
        transfer.announced_at = now
        transfer.num_tokens = event.num_tokens
        transfer.prompt_digest = event.prompt_digest
        self._keys_of_request.setdefault(event.request_id, set()).add(transfer.key)
        if transfer.state is _S.ENDED:
            return  # cancelled before it began; the blocks are released when the engine is done with it
        transfer.deadline = None
        if transfer.state is _S.NEW:
            transfer.state = _S.COMPUTING
            if transfer.key in self._denied:  # somebody has given up before the request came
                transfer.unbound = (End.CANCELLED, Reason.CONSUMER_GONE, "")
            return
        assert transfer.registration is not None
        refusal = self._refusal(transfer, transfer.registration)
        if refusal is None:
            transfer.state = _S.MATCHED
            self._advance(transfer, now)
        else:
            self._dismiss(transfer, End.FAILED, *refusal, now)
            transfer.state = _S.COMPUTING

    def _on_advanced(self, transfer: _Transfer, event: PrefillAdvanced, now: float) -> None:
        if transfer.is_engine_done or transfer.state is _S.ENDED:
            return
        assert event.first == len(transfer.ready), f"blocks from {event.first} on, but {len(transfer.ready)} are ready"
        transfer.mark_ready([*transfer.ready, *event.blocks], now, is_complete=event.is_complete)
        self._advance(transfer, now)

    def _on_restarted(self, transfer: _Transfer, event: PrefillRestarted, now: float) -> None:
        """What was written may have been read from blocks that were somebody else's: none of it counts."""
        if transfer.state is _S.ENDED:
            return
        transfer.mark_ready([], now, is_complete=False)
        if transfer.state in {_S.STREAMING, _S.WRITING}:
            self._drain(transfer, _After.RESTART)
        elif transfer.state is _S.READING:
            self._ask_to_stop_reading(
                transfer, End.FAILED, Reason.PREFILL_ABORTED, "it was preempted", _After.PREEMPTED
            )

    def _on_finished(self, transfer: _Transfer, event: PrefillFinished, now: float) -> None:
        transfer.is_engine_done = True
        if transfer.state is _S.ENDED:
            self._release_late(transfer, now)
            return
        transfer.mark_ready(list(event.blocks), now, is_complete=True)
        if transfer.state is _S.COMPUTING:
            self._hold(transfer, now)
        else:
            self._advance(transfer, now)

    def _on_aborted(self, transfer: _Transfer, event: PrefillAborted, now: float) -> None:
        transfer.is_engine_done = True
        if transfer.state is _S.ENDED:
            self._release_late(transfer, now)
        elif transfer.state in {_S.WRITING, _S.READING}:
            pass  # the KV is complete, and its blocks are kept
        elif transfer.state is _S.DRAINING:
            if transfer.after in {_After.RESTART, _After.PREEMPTED} and not transfer.is_complete:
                transfer.after = _After.ABORT
        elif transfer.state is _S.STREAMING:
            self._drain(transfer, _After.ABORT)
        else:
            self._finish(transfer, End.FAILED, Reason.PREFILL_ABORTED, "", now)

    def _on_register(self, transfer: _Transfer, event: RegisterReceived, now: float) -> None:
        message = event.message
        if (event.peer, message.attempt) in self._denied.get(transfer.key, ()):
            self._reply_ended(transfer, event.peer, message.attempt, End.FAILED, Reason.UNKNOWN_TRANSFER, "")
        elif event.invalid:
            self._reply_ended(transfer, event.peer, message.attempt, End.FAILED, Reason.INVALID_BLOCKS, event.invalid)
        elif transfer.state is _S.ENDED:
            self._answer_with_end(transfer, event.peer, message.attempt)
        elif transfer.is_registered_by(event.peer, message.attempt) or transfer.is_pending_for(
            event.peer, message.attempt
        ):
            transfer.actions.append(SendMessage(event.peer, Accepted(transfer.key, message.attempt)))
        elif transfer.after is _After.ABORT:
            self._reply_ended(transfer, event.peer, message.attempt, End.FAILED, Reason.PREFILL_ABORTED, "")
        elif message.attempt < transfer.highest_attempt or (
            transfer.registration is not None and message.attempt == transfer.highest_attempt
        ):
            detail = f"attempt {transfer.highest_attempt} is in state {transfer.state}"
            self._reply_ended(transfer, event.peer, message.attempt, End.SUPERSEDED, Reason.NEWER_ATTEMPT, detail)
        elif (block := self._claimed_elsewhere(transfer, message, event.peer)) is not None:
            self._deny(transfer, event.peer, message.attempt, now)  # it may come again when the block is free
            detail = f"block {block} is registered for another transfer, which is not over"
            self._reply_ended(transfer, event.peer, message.attempt, End.FAILED, Reason.INVALID_BLOCKS, detail)
        elif transfer.registration is None:
            self._adopt(transfer, message, event.peer, now)
        else:
            self._supersede(transfer, message, event.peer, now)

    def _supersede(self, transfer: _Transfer, message: Register, peer: PeerName, now: float) -> None:
        """A newer attempt takes over, at once or when nothing of the older one is in flight."""
        refusal = self._refusal(transfer, message) if transfer.request_id is not None else None
        if refusal is not None:
            self._reply_ended(transfer, peer, message.attempt, End.FAILED, *refusal)
            return
        if transfer.state in {_S.REGISTERED, _S.MATCHED}:
            self._end_binding(transfer, End.SUPERSEDED, Reason.NEWER_ATTEMPT, "", now)
            self._adopt(transfer, message, peer, now)
            return
        if transfer.pending is not None:
            older, older_peer = transfer.pending
            self._drop_pending(transfer, now)
            self._reply_ended(transfer, older_peer, older.attempt, End.SUPERSEDED, Reason.NEWER_ATTEMPT, "")
        transfer.pending = (message, peer)
        transfer.highest_attempt = message.attempt
        transfer.registered_at = now
        self._keys_of_peer.tie(peer, transfer.key)
        transfer.actions.append(SendMessage(peer, Accepted(transfer.key, message.attempt)))
        if transfer.state is _S.READING:
            self._ask_to_stop_reading(transfer, End.SUPERSEDED, Reason.NEWER_ATTEMPT, "", _After.REBIND)
        elif transfer.after in {None, _After.RESTART}:
            self._drain(transfer, _After.REBIND)

    def _on_cancel(self, transfer: _Transfer, event: CancelReceived, now: float) -> None:
        state = transfer.state
        if state is _S.ENDED:
            transfer.actions.append(SendMessage(event.peer, Quiesced(transfer.key, event.attempt)))
        elif transfer.is_registered_by(event.peer, event.attempt):
            transfer.reason = event.reason
            if self._is_writing(transfer):
                self._drain(transfer, _After.CANCEL if transfer.after is not _After.ABORT else _After.ABORT)
                return
            transfer.actions.append(SendMessage(event.peer, Quiesced(transfer.key, event.attempt)))
            self._lose_binding(transfer, event.reason, "", now)
        else:
            transfer.actions.append(SendMessage(event.peer, Quiesced(transfer.key, event.attempt)))
            self._deny(transfer, event.peer, event.attempt, now)
            if transfer.is_pending_for(event.peer, event.attempt):
                self._drop_pending(transfer, now)
            elif transfer.registration is None and event.attempt >= transfer.highest_attempt:
                transfer.highest_attempt = event.attempt
                self._lose_binding(transfer, event.reason, "", now)

    def _on_done(self, transfer: _Transfer, event: DoneReceived, now: float) -> None:
        is_reader = transfer.registration is not None and transfer.registration.mode is TransferMode.PULL
        if not is_reader or not transfer.is_registered_by(event.peer, event.attempt):
            return
        if transfer.state is _S.READING:
            self._finish(transfer, End.COMPLETED, Reason.NONE, "", now)
        elif transfer.state is _S.DRAINING:  # it was superseded, and has nothing in flight any more
            self._drained(transfer, now)

    def _on_status(self, transfer: _Transfer, event: StatusAsked, now: float) -> None:
        state = transfer.state
        if state is _S.ENDED:
            self._answer_with_end(transfer, event.peer, event.attempt)
        elif state is _S.NEW or transfer.attempt_of(event.peer) != event.attempt:
            self._deny(transfer, event.peer, event.attempt, now)
            self._reply_ended(transfer, event.peer, event.attempt, End.FAILED, Reason.UNKNOWN_TRANSFER, "")
        elif state is _S.READING:
            transfer.actions.append(self._located(transfer, now))
        elif self._is_writing(transfer) and transfer.is_registered_by(event.peer, event.attempt):
            # Where the consumer's side has to drive the transport, WRITEs land only while it knows of them.
            transfer.actions.append(SendMessage(event.peer, Writing(transfer.key, event.attempt)))

    def _on_peer_lost(self, transfer: _Transfer, event: PeerLost, now: float) -> None:
        if transfer.pending is not None and transfer.pending[1] == event.peer:
            self._drop_pending(transfer, now)
        if transfer.peer != event.peer:
            return
        transfer.reason, transfer.detail = Reason.PEER_LOST, event.detail
        if self._is_writing(transfer):
            self._drain(transfer, _After.PEER_LOST if transfer.after is not _After.ABORT else _After.ABORT)
        else:
            self._lose_binding(transfer, Reason.PEER_LOST, event.detail, now)

    def _is_writing(self, transfer: _Transfer) -> bool:
        """Whether WRITEs of ours may be in flight."""
        is_push = transfer.registration is not None and transfer.registration.mode is TransferMode.PUSH
        return is_push and transfer.state in {_S.STREAMING, _S.WRITING, _S.DRAINING}

    def _on_writes_over(self, transfer: _Transfer, event: WritesDone | WritesFailed, now: float) -> None:
        if transfer.state is _S.DRAINING:
            self._drained(transfer, now)
        elif isinstance(event, WritesFailed):
            self._end_binding(transfer, End.FAILED, Reason.TRANSPORT, event.detail, now)
            self._rest(transfer, now)
        else:
            transfer.num_bytes, transfer.num_descriptors = event.num_bytes, event.num_descriptors
            self._finish(transfer, End.COMPLETED, Reason.NONE, "", now)

    def _drain(self, transfer: _Transfer, after: _After) -> None:
        """Post nothing more, and go on with `after` when nothing is in flight; the latest wish counts."""
        if transfer.state is not _S.DRAINING:
            transfer.actions.append(StopPosting(transfer.key))
        transfer.state = _S.DRAINING
        transfer.after = after

    def _ask_to_stop_reading(self, transfer: _Transfer, end: End, reason: Reason, detail: str, after: _After) -> None:
        """It is over for the consumer, which drains its own READs, and says so with its `Cancel`."""
        assert transfer.peer is not None
        assert transfer.registration is not None
        self._reply_ended(transfer, transfer.peer, transfer.registration.attempt, end, reason, detail)
        transfer.state, transfer.after = _S.DRAINING, after

    def _drained(self, transfer: _Transfer, now: float) -> None:
        """Nothing is in flight."""
        assert transfer.peer is not None
        assert transfer.registration is not None
        after, transfer.after = transfer.after, None
        transfer.forget_writes()
        match after:
            case _After.RESTART:
                transfer.state = _S.MATCHED
                self._advance(transfer, now)
            case _After.REBIND:
                self._end_binding(transfer, End.SUPERSEDED, Reason.NEWER_ATTEMPT, "", now)
                self._rest(transfer, now)
            case _After.PREEMPTED:
                self._end_binding(transfer, End.FAILED, Reason.PREFILL_ABORTED, "it was preempted", now)
                self._rest(transfer, now)
            case _After.CANCEL:
                peer, attempt = transfer.peer, transfer.registration.attempt
                transfer.actions.append(SendMessage(peer, Quiesced(transfer.key, attempt)))
                self._lose_binding(transfer, transfer.reason, transfer.detail, now)
            case _After.PEER_LOST:
                self._lose_binding(transfer, Reason.PEER_LOST, transfer.detail, now)
            case _:
                self._finish(transfer, End.FAILED, Reason.PREFILL_ABORTED, "", now)

    def _on_deadline(self, transfer: _Transfer, event: DeadlineReached, now: float) -> None:
        if transfer.state is _S.HELD:
            self._finish(transfer, *(transfer.unbound or (End.EXPIRED, Reason.LEASE_EXPIRED, "")), now)
        elif transfer.state is _S.REGISTERED:
            waited = event.last_look - transfer.registered_at
            if waited < self._timing.orphan_seconds:
                transfer.deadline = now + self._timing.heartbeat_seconds
            else:
                self._finish(transfer, End.FAILED, Reason.PREFILL_NEVER_CAME, f"waited {waited:.1f} s", now)

    # Steps that several handlers take.

    def _claimed_elsewhere(self, transfer: _Transfer, message: Register, peer: PeerName) -> int | None:
        """A block of this registration that another transfer may write to; None if there is none."""
        return self._claims.foreign(transfer.key, peer, message.blocks) if message.mode is TransferMode.PUSH else None

    def _claim(self, transfer: _Transfer) -> None:
        """No other transfer may write to what this one is registered for, or will be."""
        current, (newer, newer_peer) = transfer.registration, transfer.pending or (None, None)
        if transfer.state is _S.ENDED:
            current = newer = None
        before, newer_before = transfer.claimed
        if current is before and newer is newer_before:
            return
        transfer.claimed = current, newer
        claims = [
            (peer, message.blocks)
            for message, peer in ((current, transfer.peer), (newer, newer_peer))
            if message is not None and peer is not None and message.mode is TransferMode.PUSH
        ]
        self._claims.set(transfer.key, claims)

    def _adopt(self, transfer: _Transfer, message: Register, peer: PeerName, now: float) -> None:
        """Nobody is registered: take this one."""
        if transfer.request_id is not None and (refusal := self._refusal(transfer, message)) is not None:
            self._reply_ended(transfer, peer, message.attempt, End.FAILED, *refusal)
            if transfer.state in {_S.MATCHED, _S.DRAINING}:
                self._rest(transfer, now)
            return
        transfer.registration, transfer.peer, transfer.registered_at = message, peer, now
        transfer.highest_attempt = message.attempt
        transfer.unbound = None
        transfer.forget_writes()
        self._keys_of_peer.tie(peer, transfer.key)
        transfer.actions.append(SendMessage(peer, Accepted(transfer.key, message.attempt)))
        if transfer.request_id is None:
            transfer.state = _S.REGISTERED
            transfer.deadline = now + self._timing.orphan_seconds
            return
        transfer.deadline = None
        transfer.state = _S.MATCHED
        self._advance(transfer, now)

    def _lose_binding(self, transfer: _Transfer, reason: Reason, detail: str, now: float) -> None:
        """The consumer is not interested any more, or gone; another one may be."""
        if reason is Reason.NOT_NEEDED:
            self._finish(transfer, End.COMPLETED, reason, detail, now, tell_peer=False)
            return
        self._unbind(transfer, now)
        end = End.FAILED if reason is Reason.PEER_LOST else End.CANCELLED
        transfer.unbound = (end, reason, detail)
        self._rest(transfer, now)

    def _end_binding(self, transfer: _Transfer, end: End, reason: Reason, detail: str, now: float) -> None:
        """Dismiss the consumer; the transfer ends likewise if no other one comes."""
        self._dismiss(transfer, end, reason, detail, now)
        transfer.unbound = (end, reason, detail)

    def _rest(self, transfer: _Transfer, now: float) -> None:
        """Nobody is registered and nothing is in flight: who comes next?"""
        if transfer.is_engine_done and not transfer.is_complete:
            self._finish(transfer, End.FAILED, Reason.PREFILL_ABORTED, "", now)
        elif transfer.pending is not None:
            message, peer = transfer.pending
            transfer.pending = None
            self._adopt(transfer, message, peer, now)
        elif transfer.request_id is None:
            transfer.state = _S.NEW  # nothing is known of it, but for the denials
        elif transfer.is_engine_done:
            self._hold(transfer, now)
        else:
            transfer.state, transfer.deadline = _S.COMPUTING, None

    def _hold(self, transfer: _Transfer, now: float) -> None:
        """Keep the blocks for a while."""
        is_abandoned = transfer.unbound is not None
        transfer.state = _S.HELD
        transfer.deadline = now + (self._timing.rebind_seconds if is_abandoned else self._timing.lease_seconds)

    def _drop_pending(self, transfer: _Transfer, now: float) -> None:
        """The attempt that was to take over does not."""
        assert transfer.pending is not None
        message, peer = transfer.pending
        self._deny(transfer, peer, message.attempt, now)
        transfer.pending = None
        if transfer.peer != peer:
            self._keys_of_peer.untie(peer, transfer.key)

    def _refusal(self, transfer: _Transfer, message: Register) -> tuple[Reason, str] | None:
        """Why a registration cannot be for the announced request; None when it can."""
        if message.prompt_digest != transfer.prompt_digest or message.num_tokens != transfer.num_tokens:
            detail = f"prefill worker's prompt has {transfer.num_tokens} tokens, decode worker's {message.num_tokens}"
            return Reason.PROMPT_DIFFERS, detail
        try:
            start, stop = block_range(message.first_token, message.num_tokens, message.block_size)
        except ValueError as error:
            return Reason.INVALID_BLOCKS, str(error)
        if message.mode is TransferMode.PUSH and len(message.blocks) != stop - start:
            return Reason.INVALID_BLOCKS, f"{len(message.blocks)} blocks registered, {stop - start} needed"
        return None

    def _dismiss(self, transfer: _Transfer, end: End, reason: Reason, detail: str, now: float) -> None:
        """Tell the consumer that it is over for its attempt, and forget it; the request itself goes on."""
        assert transfer.registration is not None
        assert transfer.peer is not None
        self._reply_ended(transfer, transfer.peer, transfer.registration.attempt, end, reason, detail)
        self._unbind(transfer, now)

    def _unbind(self, transfer: _Transfer, now: float) -> None:
        """Nobody is registered any more, nor will be by this registration: its blocks go back to D's engine."""
        if transfer.peer is not None and transfer.registration is not None:
            self._deny(transfer, transfer.peer, transfer.registration.attempt, now)
        if transfer.pending is None or transfer.pending[1] != transfer.peer:
            self._keys_of_peer.untie(transfer.peer, transfer.key)
        transfer.registration = transfer.peer = transfer.after = None
        transfer.forget_writes()

    def _advance(self, transfer: _Transfer, now: float) -> None:
        """Registration and some blocks are both here: move what can be moved."""
        if transfer.state not in {_S.MATCHED, _S.STREAMING}:
            return
        message, peer = transfer.registration, transfer.peer
        assert message is not None
        assert peer is not None
        if message.first_token == message.num_tokens:
            self._finish(transfer, End.COMPLETED, Reason.NONE, "", now)
        elif message.mode is TransferMode.PUSH:
            self._write(transfer, message, peer, now)
        elif transfer.is_complete:
            transfer.state = _S.READING
            transfer.actions.append(self._located(transfer, now))

    def _write(self, transfer: _Transfer, message: Register, peer: PeerName, now: float) -> None:
        """Give the transport what is ready and not yet written."""
        unit = min(self._block_size, message.block_size)
        ours, theirs = self._block_size // unit, message.block_size // unit
        start, stop = block_range(message.first_token, message.num_tokens, unit)
        begin, end = start + transfer.num_written, min(len(transfer.ready) * ours, stop)
        if end <= begin and not transfer.is_complete:
            return
        if transfer.state is _S.MATCHED:
            transfer.actions.append(SendMessage(peer, Writing(transfer.key, message.attempt)))
        local = units_of(transfer.ready, ours, begin, end)
        remote = units_of(message.blocks, theirs, begin - start, end - start)
        transfer.actions.append(StartWrite(transfer.key, peer, local, remote, transfer.is_complete))
        if local:
            transfer.writes.append((now, len(local)))
        transfer.num_written = end - start
        transfer.state = _S.WRITING if transfer.is_complete else _S.STREAMING

    def _located(self, transfer: _Transfer, now: float) -> SendMessage:
        message = transfer.registration
        assert message is not None
        assert transfer.peer is not None
        first = message.first_token // self._block_size
        blocks = tuple(transfer.ready[first : num_blocks_for(message.num_tokens, self._block_size)])
        located = Located(transfer.key, message.attempt, blocks, self._block_size, transfer.times_at(now))
        return SendMessage(transfer.peer, located)

    def _finish(
        self,
        transfer: _Transfer,
        end: End,
        reason: Reason,
        detail: str,
        now: float,
        *,
        tell_peer: bool = True,
    ) -> None:
        """The one end of a transfer: tell, record, release."""
        assert transfer.end is None, f"transfer {transfer.key} has ended before, as {transfer.end}"
        transfer.end, transfer.reason, transfer.detail = end, reason, detail
        transfer.state = _S.ENDED
        transfer.deadline = now + self._timing.memory_seconds
        transfer.times = transfer.times_at(now) if end is End.COMPLETED else None
        registration, peer = transfer.registration, transfer.peer
        if tell_peer and registration is not None and peer is not None:
            self._reply_ended(transfer, peer, registration.attempt, end, reason, detail)
        if transfer.pending is not None:
            message, waiting = transfer.pending
            self._drop_pending(transfer, now)
            self._answer_with_end(transfer, waiting, message.attempt)
        mode = registration.mode if registration else None
        moved = (transfer.num_bytes, transfer.num_descriptors)
        seconds = now - transfer.started
        after_prefill = transfer.times.done if transfer.times else None
        record = EndRecord(
            Role.PRODUCER, transfer.key, mode, end, reason, detail, *moved, seconds, after_prefill_seconds=after_prefill
        )
        transfer.actions.append(record)
        self._keys_of_peer.untie(transfer.peer, transfer.key)
        if transfer.is_engine_done:
            self._release(transfer)

    def _release(self, transfer: _Transfer) -> None:
        """Release the request's blocks once all transfers of it (one per consumer) are over."""
        request_id = transfer.request_id
        if request_id is None:
            return
        keys = self._keys_of_request[request_id]
        keys.discard(transfer.key)
        if not keys:
            del self._keys_of_request[request_id]
            transfer.actions.append(ReleaseRequest(request_id))

    def _release_late(self, transfer: _Transfer, now: float) -> None:
        """The transfer ended while the engine still computed; now it is done, and the memory of it may fade."""
        self._release(transfer)
        if transfer.deadline is None:
            transfer.deadline = now + self._timing.memory_seconds

    def _deny(self, transfer: _Transfer, peer: PeerName, attempt: int, now: float) -> None:
        """Never write to this registration, should it still come.

        The consumer gives its blocks away when it hears that nothing of ours is in flight, or that we know nothing of
        it; a `Register` that comes later was overtaken or sent twice.
        """
        if len(self._denied) > self._forget_denials_at:
            alive = {
                key: {each: until for each, until in denials.items() if until > now}
                for key, denials in self._denied.items()
            }
            self._denied = {key: denials for key, denials in alive.items() if denials}
            self._forget_denials_at = max(_DENIALS_KEPT, 2 * len(self._denied))
        self._denied.setdefault(transfer.key, {})[peer, attempt] = now + self._timing.memory_seconds

    def _answer_with_end(self, transfer: _Transfer, peer: PeerName, attempt: int) -> None:
        """What became of it. Only the attempt that completed may hear `completed`; all others failed."""
        assert transfer.end is not None
        if transfer.end is End.COMPLETED and not transfer.is_registered_by(peer, attempt):
            self._reply_ended(transfer, peer, attempt, End.FAILED, Reason.HANDED_OVER, "")
        else:
            self._reply_ended(transfer, peer, attempt, transfer.end, transfer.reason, transfer.detail)

    def _reply_ended(
        self, transfer: _Transfer, peer: PeerName, attempt: int, end: End, reason: Reason, detail: str
    ) -> None:
        told: tuple[Any, ...] = ()
        if end is End.COMPLETED:
            told = (transfer.num_bytes, transfer.num_descriptors, transfer.times)
        transfer.actions.append(SendMessage(peer, Ended(transfer.key, attempt, end, reason, detail, *told)))

    def _is_forgotten(self, transfer: _Transfer, event: ProducerEvent) -> bool:
        """An end is remembered until its time is over, and at least until the engine is done with the request."""
        engine_has_it = transfer.request_id is not None and not transfer.is_engine_done
        return isinstance(event, DeadlineReached) and not engine_has_it


_Handler = Callable[[Producer, _Transfer, Any, float], None]

_HANDLERS: dict[type[Any], _Handler] = {
    PrefillAnnounced: Producer._on_announced,
    PrefillAdvanced: Producer._on_advanced,
    PrefillRestarted: Producer._on_restarted,
    PrefillFinished: Producer._on_finished,
    PrefillAborted: Producer._on_aborted,
    RegisterReceived: Producer._on_register,
    CancelReceived: Producer._on_cancel,
    DoneReceived: Producer._on_done,
    StatusAsked: Producer._on_status,
    PeerLost: Producer._on_peer_lost,
    WritesDone: Producer._on_writes_over,
    WritesFailed: Producer._on_writes_over,
    DeadlineReached: Producer._on_deadline,
}
