"""Routers that follow a prefill."""

from tests.mover.rig import Rig

from kvberth.mover import AdvancePrefill, RestartPrefill, SchedulePrefill
from kvberth.mover.watchers import _KEPT
from kvberth.protocol import TransferKey, TransferMode, decode, encode
from kvberth.protocol.events import PrefillAdvanced, PrefillRestarted
from kvberth.protocol.messages import Progress, Watch

ROUTE = b"route-R"


def watch(rig: Rig) -> None:
    rig.producer.core.frame_from_client(ROUTE, encode(Watch(rig.key)), rig.now)


def heard(rig: Rig) -> list[tuple[int, int, int, bool]]:
    """(tokens, scheduled, done, is_registered) of all that the router was told; nothing else is told to it."""
    waiting = rig.producer.wire.to_clients
    told = [decode(frame) for route, frame in [*rig.to_others, *waiting] if route == ROUTE]
    rig.to_others, rig.producer.wire.to_clients = [], [each for each in waiting if each[0] != ROUTE]
    assert all(isinstance(each, Progress) and each.key == rig.key for each in told)
    return [(each.num_tokens, each.scheduled_tokens, each.done_tokens, each.is_registered) for each in told]


def test_a_prefill_is_followed_from_its_arrival_to_its_end():
    """Queued, a step begun, a step done, a decode worker there, complete."""
    rig = Rig()
    watch(rig)
    assert heard(rig) == []
    rig.announce()
    assert heard(rig) == [(40, 0, 0, False)]
    rig.producer.core.command(SchedulePrefill((rig.key,), 32), rig.now)
    assert heard(rig) == [(40, 32, 0, False)]
    rig.producer.core.command(AdvancePrefill((rig.key,), PrefillAdvanced(0, (1, 2), False)), rig.now)
    assert heard(rig) == [(40, 32, 32, False)]
    rig.wait(TransferMode.PUSH)
    rig.settle()
    assert heard(rig) == [(40, 32, 32, True)]
    rig.finish()
    assert heard(rig) == [(40, 32, 40, True)]
    rig.settle()
    told, _ = rig.to_others, rig.producer.wire.to_clients
    assert [decode(frame).is_handed_over for route, frame in told if route == ROUTE] == [True]
    assert heard(rig) == [(40, 32, 40, True)]
    rig.producer.core.command(SchedulePrefill((rig.key,), 40), rig.now)
    assert heard(rig) == []


def test_who_comes_late_is_told_where_it_stands():
    """And of a preemption."""
    rig = Rig()
    rig.announce()
    rig.wait(TransferMode.PUSH)
    rig.settle()
    rig.producer.core.command(AdvancePrefill((rig.key,), PrefillAdvanced(0, (1,), False)), rig.now)
    watch(rig)
    assert heard(rig) == [(40, 16, 16, True)]
    rig.producer.core.command(RestartPrefill((rig.key,), PrefillRestarted()), rig.now)
    assert heard(rig) == [(40, 0, 0, True)]


def test_wishes_of_a_dead_router_are_forgotten():
    """They are bounded in number."""
    rig = Rig()
    watch(rig)
    for number in range(_KEPT):
        rig.producer.core.frame_from_client(ROUTE, encode(Watch(TransferKey(f"other-{number}"))), rig.now)
    rig.announce()
    assert heard(rig) == []
