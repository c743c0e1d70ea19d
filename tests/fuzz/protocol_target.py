"""The control channel's decoder and both machines, behind two real cores: whatever is said, and by whom.

An input is a script: steps of one byte for the kind, two for a length, and so many bytes. A step lets somebody say a
frame, an engine do something, time pass, a connection break, or what the cores have sent arrive. What is said is two
bytes of version and a map, and gets its checksum on the way, so that what is wrong in it is read; if the first byte is
not 0 it is a frame as it stands.

What is held: nothing raises, a state that the tables do not have included; while nobody speaks in P's or D's own name,
WRITEs and READs go only to blocks that D's engine has reserved; and when all is quiet every wait has ended and every
prefill has been released.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from tests.fuzz.mutation import changed_value
from tests.protocol.engines import BLOCK_SIZE, FINGERPRINT

from kvberth.keys import Certificate, PeerRole
from kvberth.layout import Region, Runs
from kvberth.mover import (
    AbortRequest,
    AdvancePrefill,
    AnnouncePrefill,
    AwaitRequest,
    Command,
    DeclineRequest,
    EndPrefill,
    FinishPrefill,
    RestartPrefill,
    SchedulePrefill,
)
from kvberth.mover.address import Address
from kvberth.mover.core import Core
from kvberth.mover.inbox import Outbox
from kvberth.protocol import (
    PROTOCOL_VERSION,
    End,
    EngineCard,
    Reason,
    ReportReceived,
    Timing,
    TransferKey,
    TransferMode,
)
from kvberth.protocol.events import (
    PrefillAborted,
    PrefillAdvanced,
    PrefillAnnounced,
    PrefillFinished,
    PrefillRestarted,
    RequestDeclined,
    RequestWaiting,
)
from kvberth.protocol.ids import RequestId
from kvberth.protocol.messages import (
    Accepted,
    Alive,
    Cancel,
    Done,
    Ended,
    Heartbeat,
    Hello,
    Located,
    Message,
    Quiesced,
    Register,
    Watch,
    Welcome,
    Writing,
    sealed,
)
from kvberth.transport import Direction, Handle, TransportError

__all__ = ["changed", "run", "seeds"]

FROM_E, FROM_ROUTER, FROM_STRANGER, FROM_Q, AS_D, AS_P, P_DOES, D_DOES, TIME, DELIVER, BREAKS = range(11)
_KINDS = 11
_FRAMES = (FROM_E, FROM_ROUTER, FROM_STRANGER, FROM_Q, AS_D, AS_P)
_OTHERS = (P_DOES, D_DOES, TIME, DELIVER, BREAKS)
_MOST_STEPS = 32

_NUM_BLOCKS, _NUM_TOKENS, _PORT = 64, 40, 14579
_KEYS = (TransferKey("t-1"), TransferKey("t-2"))
_P, _Q = Address(f"P:{_PORT}"), Address(f"Q:{_PORT}")
_CERTIFICATES = {
    name: Certificate(name, PeerRole.ROUTER if name == "R" else PeerRole.ENGINE, name.lower() * 40) for name in "DERS"
}


class Step(NamedTuple):
    """One step of a script."""

    kind: int
    payload: bytes


def run(data: bytes) -> None:
    """Play a script; raises `AssertionError`, or whatever the code under test raises."""
    world = _World()
    for step in _steps(data):
        world.play(step)
    world.end()


def changed(data: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    """The script with one change."""
    steps = _steps(data) or [Step(DELIVER, b"")]
    at = draw.randrange(len(steps))
    match draw.randrange(8):
        case 0:
            del steps[at]
        case 1:
            steps.insert(draw.randrange(len(steps) + 1), steps[at])
        case 2:
            steps.insert(at, draw.choice(_steps(draw.choice(others)) or steps))
        case 3:
            steps.insert(at, Step(draw.choice(_OTHERS), draw.randbytes(1)))
        case 4:
            kinds = _FRAMES if steps[at].kind in _FRAMES else _OTHERS
            steps[at] = Step(draw.choice(kinds), steps[at].payload)
        case 5:
            payload = bytearray(steps[at].payload or b"\0")
            payload[draw.randrange(len(payload))] = draw.randrange(256)
            steps[at] = Step(steps[at].kind, bytes(payload))
        case _:
            steps[at] = Step(steps[at].kind, _changed_saying(steps[at].payload, draw))
    return _script(steps[:_MOST_STEPS])


def seeds() -> list[bytes]:
    """Scripts in which each message is said at least once, in every place where it belongs and in some where not."""
    push, pull = TransferMode.PUSH, TransferMode.PULL
    key = _KEYS[0]
    card = _card("E")
    register = Register(
        key=_KEYS[1],
        attempt=0,
        mode=push,
        first_token=0,
        num_tokens=_NUM_TOKENS,
        prompt_digest=b"t-2",
        block_size=BLOCK_SIZE,
        blocks=(5, 6, 7),
    )
    newer = msgspec.structs.replace(register, key=key, attempt=1, prompt_digest=b"t-1")
    insider = [Hello(card, 1), register, msgspec.structs.replace(register, mode=pull, blocks=(), attempt=1)]
    ends: list[Message] = [Ended(key, 0, end, Reason.NONE) for end in End]
    said_by_p = [Accepted(key, 0), Writing(key, 0), Located(key, 0, (0, 1, 2), BLOCK_SIZE), Quiesced(key, 0), *ends]
    announce, advance, finish, deliver = (
        Step(P_DOES, b"\0"),
        Step(P_DOES, b"\1"),
        Step(P_DOES, b"\2"),
        Step(DELIVER, b""),
    )
    wait, wait_pull, abort = Step(D_DOES, b"\0"), Step(D_DOES, b"\1"), Step(D_DOES, b"\2")
    second, end_second = Step(P_DOES, b"\x80"), Step(P_DOES, b"\x82")

    def frames(kind: int, messages: Sequence[Message]) -> list[Step]:
        return [Step(kind, _said(msgspec.msgpack.encode(message))) for message in messages]

    hello = frames(FROM_E, insider[:1])
    scripts = [
        [announce, wait, deliver, advance, deliver, finish, deliver],
        [wait_pull, deliver, announce, finish, deliver, deliver],
        [announce, wait, deliver, advance, abort, deliver, wait, deliver, finish, deliver],
        [second, announce, wait, *frames(FROM_E, insider), deliver, finish, end_second, deliver],
        [*hello, announce, wait, deliver, advance, *frames(FROM_E, [newer]), finish, deliver, *frames(FROM_E, [newer])],
        [*hello, second, *frames(FROM_E, [register, Alive(1000.0), Heartbeat(((_KEYS[1], 0),))]), end_second, deliver],
        [*hello, second, end_second, *frames(FROM_E, [insider[2], Heartbeat(), Done(_KEYS[1], 1), Done(key, 0)])],
        [announce, wait, deliver, *frames(FROM_E, [*insider, Cancel(key, 0, Reason.NOT_NEEDED)]), finish, deliver],
        [
            *frames(FROM_ROUTER, [Watch(key), Cancel(key, 0, Reason.CONSUMER_GONE)]),
            announce,
            finish,
            Step(TIME, b"\x20"),
        ],
        [*frames(FROM_STRANGER, [Cancel(key, 0, Reason.CONSUMER_GONE), register, Watch(key)]), announce, wait, deliver],
        [wait, deliver, *frames(FROM_Q, [Welcome(_card("Q")), *said_by_p]), announce, finish, deliver],
        [announce, wait, *frames(AS_P, [Welcome(_card("P")), *said_by_p[:2]]), deliver, *frames(AS_P, said_by_p[2:])],
        [announce, *frames(AS_D, [Hello(_card("D"), 9), newer, Heartbeat()]), advance, Step(P_DOES, b"\4"), finish],
        [announce, wait, deliver, advance, Step(P_DOES, b"\3"), Step(TIME, b"\x08"), deliver, wait],
        [announce, wait, deliver, advance, Step(TIME, b"\x20"), wait, deliver, Step(D_DOES, b"\3"), finish, deliver],
        [announce, wait, deliver, Step(BREAKS, b"\5"), Step(BREAKS, b"\1"), deliver, advance, finish, deliver],
        [*hello, announce, wait, Step(BREAKS, b"\2"), deliver, Step(BREAKS, b"\3"), Step(BREAKS, b"\4"), finish],
    ]
    return [_script(steps) for steps in scripts]


def _steps(data: bytes) -> list[Step]:
    steps = []
    while len(data) >= 3 and len(steps) < _MOST_STEPS:
        length = int.from_bytes(data[1:3], "big")
        steps.append(Step(data[0] % _KINDS, data[3 : 3 + length]))
        data = data[3 + length :]
    return steps


def _script(steps: Sequence[Step]) -> bytes:
    return b"".join(
        bytes((step.kind,)) + len(step.payload[:65535]).to_bytes(2, "big") + step.payload[:65535] for step in steps
    )


def _said(body: bytes, version: int = PROTOCOL_VERSION) -> bytes:
    return version.to_bytes(2, "big") + body


def _frame(said: bytes) -> bytes:
    return said if len(said) < 2 or said[0] else sealed(said[2:], int.from_bytes(said[:2], "big"))


def _changed_saying(said: bytes, draw: random.Random) -> bytes:
    """The same message with another value in it, if it is one."""
    try:
        body = msgspec.msgpack.encode(changed_value(msgspec.msgpack.decode(said[2:]), draw))
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, TypeError):
        return said + draw.randbytes(1)
    return _said(body, PROTOCOL_VERSION if draw.random() < 0.98 else draw.randrange(2**16))


def _card(name: str) -> EngineCard:
    return EngineCard(
        engine_id=name,
        incarnation="a",
        rank=0,
        fingerprint=FINGERPRINT,
        regions=(Region(address=0, block_stride=1, block_length=1),),
        num_blocks=_NUM_BLOCKS,
        agent_metadata=name.encode(),
    )


class _Transport:
    """Moves nothing: blocks are one byte long, and addresses are their ids. What it is asked to move is looked at."""

    def __init__(self, world: "_World") -> None:
        self._world = world
        self._peers: set[str] = set()
        self._polls: dict[Handle, int] = {}
        self._number = 0

    def metadata(self) -> bytes:
        return b""

    def add_peer(self, metadata: bytes) -> str:
        name = metadata.decode(errors="replace")
        if name not in {"P", "Q", "D", "E"}:
            raise TransportError("not an agent's metadata")
        self._peers.add(name)
        return name

    def remove_peer(self, name: str, *, is_live: bool) -> None:
        self._peers.discard(name)

    def post(self, direction: Direction, peer: str, runs: Runs) -> Handle:
        for start, length, _ in runs.remote.tolist():
            if start + length > _NUM_BLOCKS:
                raise TransportError("not in registered memory")
        if peer not in self._peers:
            raise TransportError("not connected")
        is_reading = direction is Direction.READ
        written = {
            block
            for start, length, _ in (runs.local if is_reading else runs.remote).tolist()
            for block in range(start, start + length)
        }
        if (is_reading or peer == "D") and not self._world.is_forged:
            assert written <= self._world.reserved, f"{direction} to blocks {written - self._world.reserved}"
        self._number += 1
        self._polls[Handle(self._number)] = 2
        return Handle(self._number)

    def is_done(self, handle: Handle) -> bool:
        if not self._peers:
            raise TransportError("gone")
        self._polls[handle] -= 1
        return self._polls[handle] <= 0

    def release(self, handle: Handle) -> None:
        del self._polls[handle]

    def register(self, regions: Sequence[Region], num_blocks: int) -> None: ...
    def progress(self) -> None: ...
    def close(self) -> None: ...


class _Rank(Outbox):
    """One engine's core, its end of the control channel, and what its engine has in hand."""

    def __init__(self, world: "_World", name: str) -> None:
        super().__init__()
        self._world = world
        self.to_clients: list[tuple[bytes, bytes]] = []
        self.to_servers: list[tuple[Address, bytes]] = []
        self.gone: set[bytes] = set()
        self.core = Core(_card(name), _Transport(world), self, self, Timing())

    def resolve(self, address: Address, now: float) -> Address:
        return address

    def dial(self, address: Address) -> None: ...
    def hang_up(self, address: Address) -> None: ...

    def send_to_client(self, route: bytes, frame: bytes) -> bool:
        if route in self.gone:
            return False
        self.to_clients.append((route, frame))
        return True

    def send_to_server(self, address: Address, frame: bytes) -> None:
        self.to_servers.append((address, frame))

    def received(self, report: ReportReceived) -> None:
        key, blocks = self._world.waits.pop(report.request_id)
        self._world.waiting.discard(key)
        self._world.reserved -= set(blocks)

    def released(self, request_id: RequestId) -> None:
        del self._world.prefills[request_id]


class _Prefill:
    """A request on P."""

    def __init__(self, key: TransferKey, number: int) -> None:
        self.key, self.request_id = key, RequestId(f"p-{number}")
        self.blocks = tuple((3 * number + each) % _NUM_BLOCKS for each in range(3))
        self.num_told = 0
        self.is_over = False


class _World:
    """P and D, whose engines do only what engines do."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.is_forged = False
        self.reserved: set[int] = set()
        self.waits: dict[RequestId, tuple[TransferKey, tuple[int, ...]]] = {}
        self.waiting: set[TransferKey] = set()
        self.prefills: dict[RequestId, _Prefill] = {}
        self._number = 0
        self._attempts = dict.fromkeys(_KEYS, 0)
        self._p, self._d = _Rank(self, "P"), _Rank(self, "D")

    def play(self, step: Step) -> None:
        kind, payload = step
        argument = payload[0] if payload else 0
        self._look()
        match kind:
            case _ if kind in (FROM_E, FROM_ROUTER, FROM_STRANGER, AS_D):
                name = {FROM_E: "E", FROM_ROUTER: "R", FROM_STRANGER: "S", AS_D: "D"}[kind]
                # Without a certificate is who dials a P that has no keys; with one, nobody is.
                self.is_forged = self.is_forged or kind in (AS_D, FROM_STRANGER)
                sender = None if kind == FROM_STRANGER else _CERTIFICATES[name]
                self._p.core.frame_from_client(name.encode(), _frame(payload), self.now, sender)
            case _ if kind in (FROM_Q, AS_P):
                self.is_forged = self.is_forged or kind == AS_P
                self._d.core.frame_from_server(_P if kind == AS_P else _Q, _frame(payload), self.now)
            case _ if kind == P_DOES:
                self._p_does(_KEYS[argument >> 7], argument & 0x7F)
            case _ if kind == D_DOES:
                self._d_does(_KEYS[argument >> 7], argument & 0x7F)
            case _ if kind == TIME:
                self.now += argument / 8
            case _ if kind == BREAKS:
                self._break(argument % 6)
            case _:
                self._deliver()
        self._turn()

    def end(self) -> None:
        """Nobody says anything any more."""
        for prefill in list(self.prefills.values()):
            if not prefill.is_over:
                self._finish(prefill)
        for _ in range(500):
            self._look()
            self._turn()
            wakes = [self._p.core.next_wakeup(self.now), self._d.core.next_wakeup(self.now)]
            due = [each for each in wakes if each is not None]
            if not due:
                break
            self.now += max(0.25, min(due))  # engines sleep longer than they are asked to
        assert not due, "something is woken for ever"
        assert not self.waits, f"still waited for: {self.waits}"
        assert not self.prefills, f"still held: {list(self.prefills)}"

    def _look(self) -> None:
        """First thing in a turn of the mover's thread."""
        for rank in (self._p, self._d):
            rank.core.look(self.now)

    def _turn(self) -> None:
        """And the last."""
        for rank in (self._p, self._d):
            rank.core.turn(self.now)

    def _deliver(self) -> None:
        for _ in range(4):
            self._look()
            to_servers, self._d.to_servers[:] = list(self._d.to_servers), []
            for address, frame in to_servers:
                if address == _P:
                    self._p.gone.clear()
                    self._p.core.frame_from_client(b"D", frame, self.now, _CERTIFICATES["D"])
            to_clients, self._p.to_clients[:] = list(self._p.to_clients), []
            for route, frame in to_clients:
                if route == b"D":
                    self._d.core.frame_from_server(_P, frame, self.now)
            self._turn()

    def _break(self, what: int) -> None:
        """What the sockets tell of connections and keys."""
        match what:
            case 0 | 5:
                self._p.gone.update({b"D"} if what else {b"E"})
                self._p.core.clients_broke(self.now)
            case 1:
                self._d.core.server_broke(_P, self.now)
            case 2:
                self._d.core.server_denies(_P, self.now)
            case 3:
                self._p.core.client_revoked(b"E", self.now)
            case _:
                self.is_forged = True  # it is said of a P whose process has ended, and this one goes on
                self._d.core.server_refuses(_P, self.now)

    def _command_p(self, command: Command) -> None:
        self._p.core.command(command, self.now)

    def _p_does(self, key: TransferKey, what: int) -> None:
        prefill = next((each for each in self.prefills.values() if each.key == key and not each.is_over), None)
        if prefill is None:
            if any(each.key == key for each in self.prefills.values()):
                return  # the engine still has the one before
            self._number += 1
            prefill = _Prefill(key, self._number)
            self.prefills[prefill.request_id] = prefill
            event = PrefillAnnounced(prefill.request_id, _NUM_TOKENS, key.transfer_id.encode())
            self._command_p(AnnouncePrefill((key,), event))
            return
        match what % 5:
            case 0:
                self._command_p(SchedulePrefill((key,), BLOCK_SIZE * (prefill.num_told + 1)))
            case 1 if prefill.num_told < len(prefill.blocks):
                first, prefill.num_told = prefill.num_told, prefill.num_told + 1
                blocks = prefill.blocks[first : first + 1]
                is_complete = prefill.num_told == len(prefill.blocks)
                self._command_p(AdvancePrefill((key,), PrefillAdvanced(first, blocks, is_complete), _Open()))
            case 3:
                prefill.is_over = True
                self._command_p(EndPrefill((key,), PrefillAborted()))
            case 4:
                prefill.num_told = 0
                self._command_p(RestartPrefill((key,), PrefillRestarted()))
            case _:
                self._finish(prefill)

    def _finish(self, prefill: _Prefill) -> None:
        prefill.is_over = True
        self._command_p(FinishPrefill((prefill.key,), PrefillFinished(prefill.blocks)))

    def _d_does(self, key: TransferKey, what: int) -> None:
        match what % 4:
            case 2:
                if key in self.waiting:
                    self._d.core.command(AbortRequest(key), self.now)
            case 3:
                if key not in self.waiting:
                    event = RequestDeclined(self._attempts[key], Reason.NOT_NEEDED)
                    self._d.core.command(DeclineRequest(key, "P", _PORT, event), self.now)
            case mode:
                free = [block for block in range(_NUM_BLOCKS) if block not in self.reserved]
                if key in self.waiting:
                    return
                self._number += 1
                request_id, blocks = RequestId(f"d-{self._number}"), tuple(free[:3])
                self.waits[request_id] = (key, blocks)
                self.waiting.add(key)
                self.reserved |= set(blocks)
                event = RequestWaiting(
                    request_id,
                    self._attempts[key],
                    TransferMode.PULL if mode == 1 else TransferMode.PUSH,
                    0,
                    _NUM_TOKENS,
                    key.transfer_id.encode(),
                    blocks,
                )
                self._attempts[key] += 1
                self._d.core.command(AwaitRequest(key, "P", _PORT, event), self.now)


class _Open:
    """A fence that has been passed."""

    def query(self) -> bool:
        return True
