"""`python -m kvberth.drills.wire_process SEED NAME=ADDRESS...`: carries the packets between network namespaces.

It makes one TUN device per name, says `ready` on its standard output, and takes a JSON list of rules per line on its
standard input, which it confirms with the numbers of packets that the rules have hit so far. It ends when that is
closed. A process of its own, so that neither the load generator nor the judge holds packets up. Needs CAP_NET_ADMIN.
"""

import fcntl
import os
import selectors
import struct
import sys
import time
from ipaddress import IPv4Address

import msgspec

from kvberth.drills.wire import Rule, Wire

__all__: list[str] = []

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_PACKET_BYTES = 65536
_AT_ONCE = 64
"""Packets read from one device before the others have their turn."""


def main(seed: int, devices: dict[str, bytes]) -> None:
    """Carry packets until standard input is closed.

    Args:
        devices: addresses by the names of the devices to make.
    """
    wire, rules = Wire(seed), msgspec.json.Decoder(list[Rule])
    watched, orders = selectors.DefaultSelector(), sys.stdin.buffer
    ends = {address: _make_device(name) for name, address in devices.items()}
    for end in ends.values():
        watched.register(end, selectors.EVENT_READ)
    watched.register(orders, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        due = wire.next_arrival()
        for key, _ in watched.select(None if due is None else max(0.0, due - time.monotonic())):
            if key.fd == orders.fileno():
                line = orders.readline()
                if not line:
                    return
                wire.set_rules(rules.decode(line))
                print(msgspec.json.encode(wire.hits).decode(), flush=True)
            else:
                _take(wire, key.fd)
        for target, packet in wire.arrived(time.monotonic()):
            if target in ends:
                _give(ends[target], packet)


def _make_device(name: str) -> int:
    """A TUN device; it lives as long as the descriptor that is returned."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return end


def _take(wire: Wire, end: int) -> None:
    for _ in range(_AT_ONCE):
        try:
            packet = os.read(end, _PACKET_BYTES)
        except OSError:  # nothing more, or the device is not up yet
            return
        wire.send(packet, time.monotonic())


def _give(end: int, packet: bytes) -> None:
    try:
        os.write(end, packet)
    except OSError:  # its namespace is going away
        return


if __name__ == "__main__":
    pairs = (each.partition("=") for each in sys.argv[2:])
    main(int(sys.argv[1]), {name: IPv4Address(address).packed for name, _, address in pairs})
