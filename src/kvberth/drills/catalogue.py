"""The drills: what goes wrong, for how long, and what of the requests may suffer.

All of them demand: that the fault was felt, no wrong answer, no request without an end, no canary corrupted, nothing
held afterwards, no threads or files left, handoffs that work again, and a `/health` that tells the truth.

The module is long because it is a list, with one entry for each drill.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kvberth.drills.client_faults import FillMemory, Garbage, GarbageOnControl, Leave, Stall
from kvberth.drills.cluster import DECODE, ENGINES, LEASE_SECONDS, PREFILL, ROUTER
from kvberth.drills.faults import (
    ClockJumps,
    DiskFull,
    Fault,
    Flap,
    Kill,
    Meddle,
    Nothing,
    Pause,
    Rules,
    Terminate,
    TransferErrors,
)
from kvberth.drills.judge import Outcome
from kvberth.drills.traffic import TrafficShape
from kvberth.drills.wire import paths
from kvberth.drills.zmtp import Meddling

__all__ = ["CORE", "DRILLS", "QUICK", "Drill", "find"]

_KILL_NOTICE = 3.0
_KILL_HOLD = 6.0
_HANG_NOTICE = 8.0
_HANG_HOLD = 10.0
"""The router's probe waits 5 s for an engine that may only be busy, and begins once a second."""
_AFTER_LEASE = LEASE_SECONDS + 5.0
"""Where nobody can tell P that its blocks are not wanted any more, its lease ends them."""
_REFUSED = frozenset({Outcome.REFUSED})

_NOBODY = ((),)
_A_PREFILL = tuple((name,) for name in PREFILL)
_A_DECODE = tuple((name,) for name in DECODE)
_EVERYBODY = (*ENGINES, ROUTER)

Victims = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """One drill.

    Attributes:
        name: for the command line.
        what: one line for people.
        victims: groups of processes, one of which is chosen by chance.
        fault: makes the fault for the chosen group.
        hold_seconds: from the fault's beginning to its end; less where `/health` has noticed it.
        is_down: the victims cannot serve meanwhile.
        notice_seconds: within which `/health` must say so; None if it need not.
        excused: what may become of requests that were under way during the fault, beside the right answer.
        settle_seconds: after the last request, until nothing may be held.
        needs_network: it is skipped where there are no network namespaces.
        traffic_seconds: for how long requests come at least; they do until some time after the fault.
    """

    name: str
    what: str
    victims: tuple[Victims, ...] = _NOBODY
    fault: Callable[[Victims, Random], Fault]
    hold_seconds: float = 4.0
    is_down: bool = False
    notice_seconds: float | None = None
    excused: frozenset[Outcome] = frozenset()
    settle_seconds: float = 5.0
    needs_network: bool = False
    traffic: TrafficShape = field(default_factory=TrafficShape)
    traffic_seconds: float = 0.0

    @property
    def loses_messages(self) -> bool:
        """Whether words between engines may be lost: with the network, or where only a lease ends what they were of."""
        return self.needs_network or self.settle_seconds >= _AFTER_LEASE


_PROCESSES = (
    Drill(
        name="calm",
        what="nothing goes wrong: what the others are compared with",
        fault=lambda _, __: Nothing(),
    ),
    Drill(
        name="kill-prefill",
        what="SIGKILL of a prefill worker, which is then started again at the same address",
        victims=_A_PREFILL,
        fault=lambda victims, _: Kill(victims),
        hold_seconds=_KILL_HOLD,
        is_down=True,
        notice_seconds=_KILL_NOTICE,
    ),
    *(
        Drill(
            name=f"restart-{role}",
            what=f"SIGKILL of a {role} worker and a new start at once, before anybody has noticed",
            victims=victims,
            fault=lambda victims, _: Kill(victims),
            hold_seconds=0.2,
            is_down=True,
        )
        for role, victims in (("prefill", _A_PREFILL), ("decode", _A_DECODE))
    ),
    Drill(
        name="kill-all-prefill",
        what="SIGKILL of both prefill workers at once: decode workers compute prompts themselves",
        victims=(PREFILL,),
        fault=lambda victims, _: Kill(victims),
        hold_seconds=_KILL_HOLD,
        is_down=True,
        notice_seconds=_KILL_NOTICE,
    ),
    Drill(
        name="kill-decode",
        what="SIGKILL of a decode worker, which is then started again at the same address",
        victims=_A_DECODE,
        fault=lambda victims, _: Kill(victims),
        hold_seconds=_KILL_HOLD,
        is_down=True,
        notice_seconds=_KILL_NOTICE,
    ),
    Drill(
        name="kill-all-decode",
        what="SIGKILL of both decode workers at once: nobody can answer before one is back",
        victims=(DECODE,),
        fault=lambda victims, _: Kill(victims),
        hold_seconds=_KILL_HOLD,
        is_down=True,
        notice_seconds=_KILL_NOTICE,
        excused=_REFUSED,
    ),
    Drill(
        name="kill-router",
        what="SIGKILL of the router, which is started again a second later",
        victims=((ROUTER,),),
        fault=lambda victims, _: Kill(victims),
        hold_seconds=1.0,
        is_down=True,
        excused=frozenset({Outcome.REFUSED, Outcome.BROKEN}),
        settle_seconds=_AFTER_LEASE,
    ),
    Drill(
        name="drain-prefill",
        what="SIGTERM to a prefill worker with vLLM's --shutdown-timeout: what it has begun arrives",
        victims=_A_PREFILL,
        fault=lambda victims, _: Terminate(victims),
        is_down=True,
    ),
    Drill(
        name="pause-prefill",
        what="SIGSTOP of a prefill worker for 2 s, less than it takes to be given up",
        victims=_A_PREFILL,
        fault=lambda victims, _: Pause(victims),
        hold_seconds=2.0,
        is_down=True,
    ),
    Drill(
        name="hang-prefill",
        what="SIGSTOP of a prefill worker until the router notices; it wakes up and does not know that it has slept",
        victims=_A_PREFILL,
        fault=lambda victims, _: Pause(victims),
        hold_seconds=_HANG_HOLD,
        is_down=True,
        notice_seconds=_HANG_NOTICE,
        excused=_REFUSED,
    ),
    Drill(
        name="pause-decode",
        what="SIGSTOP of a decode worker for 2 s",
        victims=_A_DECODE,
        fault=lambda victims, _: Pause(victims),
        hold_seconds=2.0,
        is_down=True,
    ),
    Drill(
        name="hang-decode",
        what="SIGSTOP of a decode worker until the router notices",
        victims=_A_DECODE,
        fault=lambda victims, _: Pause(victims),
        hold_seconds=_HANG_HOLD,
        is_down=True,
        notice_seconds=_HANG_NOTICE,
        excused=_REFUSED,
    ),
    Drill(
        name="pause-router",
        what="SIGSTOP of the router for 3 s",
        victims=((ROUTER,),),
        fault=lambda victims, _: Pause(victims),
        hold_seconds=3.0,
        is_down=True,
    ),
)

_NETWORK = (
    Drill(
        name="cut-prefill-decode",
        what="no packet between one prefill worker and any decode worker for 5 s; the router sees all of them",
        victims=_A_PREFILL,
        fault=lambda victims, _: Rules(paths(victims, DECODE, both_ways=True, loss=1.0)),
        hold_seconds=5.0,
        settle_seconds=_AFTER_LEASE,
        needs_network=True,
    ),
    Drill(
        name="cut-one-way",
        what="no packet from one prefill worker to the decode workers for 5 s, while theirs arrive",
        victims=_A_PREFILL,
        fault=lambda victims, _: Rules(paths(victims, DECODE, loss=1.0)),
        hold_seconds=5.0,
        settle_seconds=_AFTER_LEASE,
        needs_network=True,
    ),
    *(
        Drill(
            name=f"cut-router-{role}",
            what=f"no packet between the router and one {role} worker until the router notices",
            victims=victims,
            fault=lambda victims, _: Rules(paths((ROUTER,), victims, both_ways=True, loss=1.0)),
            hold_seconds=_HANG_HOLD,
            is_down=True,
            notice_seconds=_HANG_NOTICE,
            excused=_REFUSED,
            settle_seconds=_AFTER_LEASE,
            needs_network=True,
        )
        for role, victims in (("prefill", _A_PREFILL), ("decode", _A_DECODE))
    ),
    *(
        Drill(
            name=f"isolate-{role}",
            what=f"one {role} worker is cut off from everybody until the router notices, and comes back unawares",
            victims=victims,
            fault=lambda victims, _: Rules(paths(victims, _EVERYBODY, both_ways=True, loss=1.0)),
            hold_seconds=_HANG_HOLD,
            is_down=True,
            notice_seconds=_HANG_NOTICE,
            excused=_REFUSED,
            settle_seconds=_AFTER_LEASE,
            needs_network=True,
        )
        for role, victims in (("prefill", _A_PREFILL), ("decode", _A_DECODE))
    ),
    Drill(
        name="flapping",
        what="paths between prefill and decode workers are cut for 0.4 s, again and again",
        fault=lambda _, __: Flap(paths(PREFILL, DECODE, both_ways=True, loss=1.0), on_seconds=0.4, off_seconds=0.8),
        hold_seconds=5.0,
        settle_seconds=_AFTER_LEASE,
        needs_network=True,
    ),
    Drill(
        name="far",
        what="every packet is 40 ms late",
        fault=lambda _, __: Rules(paths(_EVERYBODY, _EVERYBODY, delay_seconds=0.04)),
        needs_network=True,
    ),
    Drill(
        name="hang-far",
        what="SIGSTOP of a prefill worker until the router notices, much being on its way: packets are 0.15 s late",
        victims=_A_PREFILL,
        fault=lambda victims, _: Pause(victims, paths(PREFILL, DECODE, both_ways=True, delay_seconds=0.15)),
        hold_seconds=_HANG_HOLD,
        is_down=True,
        notice_seconds=_HANG_NOTICE,
        excused=_REFUSED,
        needs_network=True,
        traffic=TrafficShape(rate=12.0, pull=0.6),
    ),
    Drill(
        name="lossy",
        what="3% of all packets are lost",
        fault=lambda _, __: Rules(paths(_EVERYBODY, _EVERYBODY, loss=0.03)),
        needs_network=True,
    ),
    Drill(
        name="narrow",
        what="30 kB/s from each prefill to each decode worker, about half of what the KV needs",
        fault=lambda _, __: Rules(paths(PREFILL, DECODE, bytes_per_second=30_000.0)),
        needs_network=True,
        # Heartbeats queue behind the KV; two that have lost each other cannot say what they do not want.
        settle_seconds=_AFTER_LEASE,
    ),
)

_MESSAGES = (
    Drill(
        name="messages-dropped",
        what="a fifth of all control messages is lost",
        fault=lambda _, __: Meddle(Meddling(drop=0.2)),
        settle_seconds=_AFTER_LEASE,
    ),
    Drill(
        name="messages-doubled",
        what="half of all control messages come twice",
        fault=lambda _, __: Meddle(Meddling(duplicate=0.5)),
    ),
    Drill(
        name="messages-late",
        what="control messages are half a second late",
        fault=lambda _, __: Meddle(Meddling(delay_seconds=0.5)),
    ),
    Drill(
        name="messages-corrupted",
        what="in a fifth of all control messages a byte is another one",
        fault=lambda _, __: Meddle(Meddling(corrupt=0.2)),
        settle_seconds=_AFTER_LEASE,
    ),
    Drill(
        name="control-stalls",
        what="control connections stay, but nothing comes through for 5 s",
        fault=lambda _, __: Meddle(Meddling(is_stalled=True)),
        hold_seconds=5.0,
        settle_seconds=_AFTER_LEASE,
    ),
    Drill(
        name="control-cuts",
        what="all control connections are cut at once",
        fault=lambda _, __: Meddle(Meddling(cuts=True)),
        hold_seconds=2.0,
    ),
)

_RESOURCES = (
    Drill(
        name="post-fails",
        what="NIXL refuses half of all transfers on the prefill workers",
        fault=lambda _, __: TransferErrors(PREFILL, post=0.5),
    ),
    Drill(
        name="transfer-fails",
        what="NIXL reports an error of a third of all transfers, on all engines",
        fault=lambda _, __: TransferErrors(ENGINES, transfer=0.33),
    ),
    Drill(
        name="decode-memory-full",
        what="other requests take nearly all KV blocks of both decode workers",
        fault=lambda _, __: FillMemory(DECODE),
    ),
    Drill(
        name="prefill-memory-full",
        what="other requests take nearly all KV blocks of both prefill workers",
        fault=lambda _, __: FillMemory(PREFILL),
    ),
    Drill(
        name="disk-full",
        what="nobody can write to any file, logs among them",
        fault=lambda _, __: DiskFull(),
    ),
    Drill(
        name="clock-jumps",
        what="the wall clock of each process jumps by an hour, forwards or backwards, and later back",
        fault=lambda _, chance: ClockJumps({name: chance.choice((-3600.0, 3600.0)) for name in _EVERYBODY}),
    ),
)

_CLIENTS = (
    Drill(
        name="clients-leave",
        what="half of the clients go away within a second",
        fault=lambda _, __: Leave(),
        traffic=TrafficShape(leaving=0.5),
    ),
    Drill(
        name="clients-stall",
        what="8 clients ask for long answers and read none of them",
        fault=lambda _, __: Stall(),
    ),
    Drill(
        name="garbage-requests",
        what="200 connections to the router bring what is no request, or half of one",
        fault=lambda _, chance: Garbage(chance),
    ),
    Drill(
        name="garbage-control",
        what="200 connections to the control channels bring what is no message",
        fault=lambda _, chance: GarbageOnControl(chance),
    ),
)

DRILLS = (*_PROCESSES, *_NETWORK, *_MESSAGES, *_RESOURCES, *_CLIENTS)

CORE = (
    "kill-prefill",
    "kill-decode",
    "kill-router",
    "drain-prefill",
    "hang-prefill",
    "hang-decode",
    "hang-far",
    "cut-prefill-decode",
    "cut-router-decode",
    "isolate-prefill",
    "flapping",
    "narrow",
    "messages-dropped",
    "messages-doubled",
    "messages-corrupted",
    "post-fails",
    "transfer-fails",
    "decode-memory-full",
    "disk-full",
    "clock-jumps",
    "clients-leave",
    "clients-stall",
)
"""One for each kind of fault: of many rounds they are done first."""

QUICK = ("kill-prefill", "pause-decode", "cut-prefill-decode", "messages-dropped", "post-fails", "clients-leave")
"""A round that takes less than four minutes, the cluster's start included."""


def find(name: str) -> Drill:
    """A drill by its name; raises `KeyError`."""
    return {each.name: each for each in DRILLS}[name]
