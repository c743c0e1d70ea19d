"""What becomes of packets, by the rules."""

from ipaddress import IPv4Address

import pytest

from kvberth.drills.wire import ROOM_SECONDS, Rule, Wire, paths

A, B = "10.0.0.1", "10.0.0.2"


def packet(source: str, target: str, length: int = 100, number: int = 0) -> bytes:
    """An IPv4 header and a payload that tells packets apart."""
    addresses = IPv4Address(source).packed + IPv4Address(target).packed
    return (b"\x45" + bytes(11) + addresses).ljust(length - 4, b"\0") + number.to_bytes(4, "big")


def received(wire: Wire, now: float) -> list[tuple[str, bytes]]:
    return [(str(IPv4Address(target)), each) for target, each in wire.arrived(now)]


def test_without_rules_all_arrive_at_once_and_in_order():
    """At the address that the packet names."""
    wire = Wire(0)
    sent = [packet(A, B, number=number) for number in range(5)]
    for each in sent:
        wire.send(each, 1.0)
    assert received(wire, 1.0) == [(B, each) for each in sent]
    assert wire.next_arrival() is None


def test_cut_path_is_cut_in_its_direction_only():
    """The way back is another rule."""
    wire = Wire(0)
    wire.set_rules([Rule(source=A, target=B, loss=1.0)])
    wire.send(packet(A, B), 0.0)
    wire.send(packet(B, A), 0.0)
    assert [target for target, _ in received(wire, 0.0)] == [A]
    assert wire.hits == {"dropped": 1, "delayed": 0}


def test_loss_is_about_its_share():
    """And the same for the same seed."""
    kept = []
    for _ in range(2):
        wire = Wire(7)
        wire.set_rules([Rule(source=A, target=B, loss=0.3)])
        for number in range(1000):
            wire.send(packet(A, B, number=number), 0.0)
        kept.append(received(wire, 0.0))
    assert kept[0] == kept[1]
    assert 600 < len(kept[0]) < 800


def test_delayed_packets_come_later_and_keep_their_order():
    """By the delay, each."""
    wire = Wire(0)
    wire.set_rules([Rule(source=A, target=B, delay_seconds=0.5)])
    wire.send(packet(A, B, number=1), 1.0)
    wire.send(packet(A, B, number=2), 1.2)
    assert wire.next_arrival() == 1.5
    assert received(wire, 1.4) == []
    assert received(wire, 1.6) == [(B, packet(A, B, number=1))]
    assert received(wire, 1.7) == [(B, packet(A, B, number=2))]


def test_narrow_path_takes_one_packet_after_the_other():
    """1,000 bytes at 10 kB/s take 0.1 s each."""
    wire = Wire(0)
    wire.set_rules([Rule(source=A, target=B, bytes_per_second=10_000.0)])
    for number in range(3):
        wire.send(packet(A, B, 1000, number), 0.0)
    assert [len(received(wire, now)) for now in (0.05, 0.11, 0.15, 0.21, 0.31)] == [0, 1, 0, 1, 1]


def test_narrow_path_drops_what_it_has_no_room_for():
    """As a full queue does; else a second of traffic would be late for ever."""
    wire = Wire(0)
    wire.set_rules([Rule(source=A, target=B, bytes_per_second=10_000.0)])
    for number in range(100):
        wire.send(packet(A, B, 1000, number), 0.0)
    arrived = received(wire, 100.0)
    assert len(arrived) == pytest.approx(ROOM_SECONDS / 0.1, abs=1)
    assert wire.hits == {"dropped": 100 - len(arrived), "delayed": len(arrived)}


def test_new_rules_leave_what_is_under_way():
    """It has passed the place where it would be lost."""
    wire = Wire(0)
    wire.set_rules([Rule(source=A, target=B, delay_seconds=0.5)])
    wire.send(packet(A, B), 0.0)
    wire.set_rules([Rule(source=A, target=B, loss=1.0)])
    assert len(received(wire, 0.5)) == 1


def test_what_is_no_ipv4_is_dropped():
    """Kernels send IPv6 neighbour discovery on every device."""
    wire = Wire(0)
    wire.send(b"\x60" + bytes(50), 0.0)
    wire.send(b"\x45", 0.0)
    assert wire.next_arrival() is None


def test_paths_are_each_pair_once():
    """Never from a process to itself."""
    found = {(each.source, each.target) for each in paths(("a", "b"), ("b", "c"), both_ways=True, loss=1.0)}
    assert found == {("a", "b"), ("b", "a"), ("a", "c"), ("c", "a"), ("b", "c"), ("c", "b")}
    assert [(each.source, each.target) for each in paths(("a",), ("b",))] == [("a", "b")]
