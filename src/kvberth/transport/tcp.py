"""TCP connections under the transport library, cut so that nothing more comes out of them.

Where NIXL moves bytes over TCP, a WRITE goes through the kernel's send buffer. To forget the peer at NIXL neither
closes that connection nor empties the buffer: after a cut of the network the kernel would send megabytes of a WRITE
that everybody has given up on, into blocks that are somebody else's by then. Shared memory and RDMA have no such
buffer.

NIXL has no name for its connections, so they are found by their ends: a UCX address, which is part of an agent's
metadata, has the addresses and the ports that the agent listens on. A port alone is two bytes, which by chance stand
somewhere in one of a hundred and fifty addresses; so it counts only where UCX packs one.
"""

import ctypes
import fcntl
import os
import re
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["abort_connections", "discard_unsent_on_close"]

_DESCRIPTORS = Path("/proc/self/fd")
_SIOCOUTQ = 0x5411
_ABORTIVE = struct.pack("ii", 1, 0)
_FAMILIES = {socket.AF_INET, socket.AF_INET6}
_LOOPBACK = {"127.0.0.1", "::1"}
_STEP_SECONDS = 0.005
_PAUSE_SECONDS = 0.06
"""Between two acknowledgements. Linux takes 40 ms where it hopes to send something besides."""
_LOOK_SECONDS = 0.15
"""At most, at one connection: before the kernel, with bytes of its own, asks for room where there is none."""

_libc = ctypes.CDLL(None, use_errno=True)


def abort_connections(ours: bytes, theirs: bytes) -> int:
    """Reset this process's connections with the agent whose metadata is `theirs`; returns how many there were.

    What the kernel has not sent yet is thrown away. The descriptors stay with their owner, to whom it looks as if the
    other side had reset the connection.
    """
    # A connection that is connected to nobody is one that is cut (connect(2), AF_UNSPEC).
    nobody = struct.pack("H14x", socket.AF_UNSPEC)
    with _connections(ours, theirs) as ends:
        return sum(_libc.connect(end.fileno(), nobody, len(nobody)) == 0 for end in ends)


def discard_unsent_on_close(ours: bytes, theirs: bytes) -> int:
    """Let the kernel do the same by itself when this process ends, however it ends; returns with how many."""
    with _connections(ours, theirs) as ends:
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORTIVE)
        return len(ends)


@contextmanager
def _connections(ours: bytes, theirs: bytes) -> Iterator[list[socket.socket]]:
    """This process's connections with that agent, as descriptors of our own, which are closed behind their use."""
    numbers = [int(path.name) for path in _DESCRIPTORS.iterdir()] if sys.platform == "linux" else []
    with ExitStack() as stack:
        sockets = [stack.enter_context(end) for number in numbers if (end := _socket_of(number)) is not None]
        yield [end for end in sockets if _is_between(end, ours, theirs)]


def _socket_of(descriptor: int) -> socket.socket | None:
    """A copy of a TCP socket; None for anything else, and for what another thread has closed since."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        end = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    if end.family in _FAMILIES and end.type == socket.SOCK_STREAM:
        return end
    end.close()
    return None


def _is_between(end: socket.socket, ours: bytes, theirs: bytes) -> bool:
    """Whether this connection is one that we made to that agent, or an accepted one in which something is stuck.

    Who has connected to us cannot be told by the port, and agents of one host have one address. So an accepted
    connection counts only if it does not drain, as those of a lost peer.
    """
    try:
        peer_host, peer_port = end.getpeername()[:2]
    except OSError:  # not connected
        return False
    our_host, our_port = end.getsockname()[:2]
    if _listens_at(theirs, end.family, peer_host, peer_port):
        return True
    return (
        _has_host(theirs, end.family, peer_host)
        and _listens_at(ours, end.family, our_host, our_port)
        and _is_stuck(end)
    )


def _listens_at(metadata: bytes, family: int, host: str, port: int) -> bool:
    """Whether a UCX address in it has this end: the device, and close behind it the length of the port, and the port.

    The length's upper two bits are flags (`ucp_address_pack`, as in NIXL 1.5.1).
    """
    return (
        re.search(
            _device(family, host) + b".{0,64}?[\x02\x42\x82\xc2]" + re.escape(port.to_bytes(2, "big")),
            metadata,
            re.DOTALL,
        )
        is not None
    )


def _has_host(metadata: bytes, family: int, host: str) -> bool:
    return re.search(_device(family, host), metadata, re.DOTALL) is not None


def _device(family: int, host: str) -> bytes:
    """A pattern of `uct_tcp_device_addr`: flags, family, and the address, or on loopback the host's own name."""
    if host in _LOOPBACK:
        return b"\x01" + bytes([family]) + b".{8}"
    return re.escape(bytes([0, family]) + socket.inet_pton(family, host.partition("%")[0]))


def _is_stuck(end: socket.socket) -> bool:
    """Whether something waits for the other side, and nothing of it arrives, as much of a WRITE in full flow does.

    What has just been sent may be acknowledged late, whether anybody reads it or not. So it is looked at until all of
    it is, or until the kernel's own timer, of 200 ms at least, has run out over it; if neither happens, what arrives at
    the end of that time counts.
    """
    began = latest = now = time.monotonic()
    acknowledged, has_run_out = _progress(end)
    while _unacknowledged_bytes(end) > 0 and now - began < _LOOK_SECONDS:
        if has_run_out:
            return True
        time.sleep(_STEP_SECONDS)
        now, before = time.monotonic(), acknowledged
        acknowledged, has_run_out = _progress(end)
        if acknowledged != before:
            latest = now
    return _unacknowledged_bytes(end) > 0 and now - latest > _PAUSE_SECONDS


def _progress(end: socket.socket) -> tuple[int, bool]:
    """Of Linux's `struct tcp_info` the bytes acknowledged (`tcpi_bytes_acked`), and whether there is a `tcpi_backoff`:
    the timer for the oldest byte has run out and was set anew, for longer.
    """
    info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
    (acknowledged,) = struct.unpack_from("Q", info, 120)
    return int(acknowledged), info[4] > 0


def _unacknowledged_bytes(end: socket.socket) -> int:
    answer = fcntl.ioctl(end.fileno(), _SIOCOUTQ, bytes(4))
    return int.from_bytes(answer, sys.byteorder)
