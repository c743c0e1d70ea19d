"""TCP connections under the transport library, cut so that nothing more comes out of them.

Where NIXL moves bytes over TCP, a WRITE goes through the library's queue and the kernel's send buffer, and a READ is a
request that the other side answers when it gets to it. To forget the peer at NIXL ends neither: after a cut of the
network, or when a process that was stopped wakes up, megabytes would come that everybody has given up on, into blocks
that are somebody else's by then. So both sides cut the connections between them.

NIXL has no name for its connections, so they are found by their ends: a UCX address, which is part of an agent's
metadata, has the addresses and the ports that the agent listens on. A port alone is two bytes, which by chance stand
somewhere in one of a hundred and fifty addresses; so it counts only where UCX packs one.

Two agents share one connection, and which of them has made it is decided by their addresses (UCX; whoever moves bytes).
Who has made an accepted one cannot be told by the port, so it counts for every agent of the host that it comes from.
"""

import ctypes
import fcntl
import os
import re
import socket
import stat
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

__all__ = [
    "abort_connections",
    "abort_muted_connections",
    "discard_unsent_on_close",
    "mute_connections",
    "tcp_sockets",
]

_DESCRIPTORS = Path("/proc/self/fd")
_CLOSED = 7
"""`TCP_CLOSE`, of which `struct tcp_info` begins with the state."""
_NOBODY = struct.pack("H14x", socket.AF_UNSPEC)
_SO_ATTACH_FILTER = _SO_GET_FILTER = 26
_FILTER = ctypes.create_string_buffer(
    b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (0x30, 0, 0, 12),  # the byte with the header's length, in its upper half,
            (0x54, 0, 0, 0xF0),
            (0x74, 0, 0, 2),  # in bytes
            (0x07, 0, 0, 0),
            (0x80, 0, 0, 0),  # is compared with the length of all:
            (0x2D, 1, 0, 0),
            (0x06, 0, 0, 0xFFFFFFFF),  # nothing but a header is let in,
            (0x06, 0, 0, 0),  # anything more is not
        )
    )
)
_NO_PAYLOAD = struct.pack("HxxxxxxP", 8, ctypes.addressof(_FILTER))
"""A program for the kernel (`struct sock_fprog`): acknowledgements and the connection's end come in, bytes do not."""
_ABORTIVE = struct.pack("ii", 1, 0)
_FAMILIES = {socket.AF_INET, socket.AF_INET6}
_LOOPBACK = {"127.0.0.1", "::1"}

_libc = ctypes.CDLL(None, use_errno=True)


def abort_connections(ours: bytes, theirs: bytes, *, accepted: bool = True) -> int:
    """Reset this process's connections with the agent whose metadata is `theirs`; returns how many there were.

    What the kernel has not sent yet is thrown away, and so is what has come and was not read, also over connections
    that the other side has reset. The descriptors stay with their owner, to whom it looks as if the other side had
    closed them.

    Args:
        accepted: whether to reset those that its host has made, too. Other agents of that host may have made them.
    """
    with tcp_sockets() as sockets:
        ends = [
            end
            for end in sockets
            if _is_made(end, theirs) or (accepted and _is_accepted(end, ours, theirs)) or _is_dead(end)
        ]
        return sum(_abort(end) for end in ends)


def mute_connections(ours: bytes, theirs: bytes) -> int:
    """Let no bytes come over this process's connections with that agent any more; returns how many there are.

    It is what a peer gets that may be about to answer our READs: UCX ends a process (1.21, in NIXL 1.5.1) whose answer
    cannot be sent. The connection stays for it, until it cuts it or is back. What has come before can still be read.

    Returns:
        0 as well if nobody can tell which connection it is: others would wait for ever over those of other agents.
    """
    with tcp_sockets() as sockets:
        made = [end for end in sockets if _is_made(end, theirs)]
        accepted = [end for end in sockets if _is_accepted(end, ours, theirs)]
        if len(accepted) > 1:
            return 0
        for end in (*made, *accepted):
            end.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _NO_PAYLOAD)
        return len(made) + len(accepted)


def abort_muted_connections(theirs: bytes) -> int:
    """Reset those connections with the host of that agent over which nothing comes; returns how many there were."""
    with tcp_sockets() as sockets:
        return sum(_abort(end) for end in sockets if _is_muted(end) and _is_with_host(end, theirs))


def discard_unsent_on_close(ours: bytes, theirs: bytes) -> int:
    """Let the kernel do the same by itself when this process ends, however it ends; returns with how many."""
    with tcp_sockets() as sockets:
        ends = [end for end in sockets if _is_made(end, theirs) or _is_accepted(end, ours, theirs)]
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORTIVE)
        return len(ends)


@contextmanager
def tcp_sockets() -> Iterator[list[socket.socket]]:
    """This process's TCP sockets, as descriptors of our own, which are closed behind their use."""
    numbers = [int(path.name) for path in _DESCRIPTORS.iterdir()] if sys.platform == "linux" else []
    with ExitStack() as stack:
        yield [stack.enter_context(end) for number in numbers if (end := _socket_of(number)) is not None]


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


def _abort(end: socket.socket) -> bool:
    """Whether it is cut.

    A connection that is connected to nobody is one that is cut (connect(2), AF_UNSPEC). UCX does not listen to the
    hang-up that this is, and would notice with its next keep-alive, after 20 s; so it is given an end to read besides.
    """
    if _libc.connect(end.fileno(), _NOBODY, len(_NOBODY)) != 0:
        return False
    with suppress(OSError):  # "not connected", but Linux does it nevertheless
        end.shutdown(socket.SHUT_RDWR)
    return True


def _is_made(end: socket.socket, theirs: bytes) -> bool:
    """Whether this connection is one that we have made to that agent."""
    try:
        host, port = end.getpeername()[:2]
    except OSError:  # not connected
        return False
    return _listens_at(theirs, end.family, host, port)


def _is_accepted(end: socket.socket, ours: bytes, theirs: bytes) -> bool:
    """Whether somebody of that agent's host has made this connection to us."""
    return _is_with_host(end, theirs) and _listens_at(ours, end.family, *end.getsockname()[:2])


def _is_with_host(end: socket.socket, theirs: bytes) -> bool:
    try:
        host = end.getpeername()[0]
    except OSError:  # not connected
        return False
    return re.search(_device(end.family, host), theirs, re.DOTALL) is not None


def _is_muted(end: socket.socket) -> bool:
    """Whether it has a filter; UCX uses none."""
    return bool(end.getsockopt(socket.SOL_SOCKET, _SO_GET_FILTER, len(_FILTER)))


def _is_dead(end: socket.socket) -> bool:
    """Whether this was a connection, and has been reset by the other side, and something of it has not been read.

    Whose it was cannot be told any more, and nobody misses much: the rest of what one has said who says nothing more.
    UCX would act on it, though: an answer to a READ that cannot be sent ends the process (1.21, in NIXL 1.5.1).
    """
    state = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state == _CLOSED and int.from_bytes(fcntl.ioctl(end.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder) > 0


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


def _device(family: int, host: str) -> bytes:
    """A pattern of `uct_tcp_device_addr`: flags, family, and the address, or on loopback the host's own name."""
    if host in _LOOPBACK:
        return b"\x01" + bytes([family]) + b".{8}"
    return re.escape(bytes([0, family]) + socket.inet_pton(family, host.partition("%")[0]))
