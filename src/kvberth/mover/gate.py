"""Who may come in: the answer to ZeroMQ's question about a peer that has proved to have a key (ZAP, ZeroMQ RFC 27).

ZeroMQ's own threads do the handshakes and ask over an inproc socket, which the mover polls with its others: no thread
of its own, no cost while nobody connects. Those without any key do not even come to the question.
"""

import logging

import zmq
from zmq.utils import z85

from kvberth.keys import Keyring
from kvberth.mover.seldom import Seldom

__all__ = ["Gate"]

_log = logging.getLogger(__name__)

_ZAP = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_AT_ONCE = 32
_NUM_FIELDS = 7
"""Version, request id, domain, address, routing id, mechanism, public key."""


class Gate:
    """Answers for all servers of one ZeroMQ context. Used by the mover's thread only."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keyring: Keyring) -> None:
        self._keyring = keyring
        self._refused = Seldom()
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP)

    def answer(self, now: float) -> bool:
        """Answer a handful of questions; whether there were any."""
        for number in range(_AT_ONCE):
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return number > 0
            self._keyring.look(now)
            public_key = _public_key(question)
            accepted = public_key is not None and self._keyring.with_key(public_key) is not None
            request_id = question[1] if len(question) > 1 else b""
            status = (b"200", b"OK", (public_key or "").encode()) if accepted else (b"400", b"key not accepted", b"")
            self.socket.send_multipart([_VERSION, request_id, *status, b""], zmq.NOBLOCK)
            if not accepted and (count := self._refused.count(now)):
                host = question[3].decode(errors="replace") if len(question) > 3 else "?"
                _log.warning(
                    "kvberth: refused a peer at %s: its key %s is not in %s (refused since the last such line: %d)",
                    host,
                    public_key,
                    self._keyring.peers_dir,
                    count,
                )
        return True

    def close(self) -> None:
        """After the servers' sockets."""
        self.socket.close(0)


def _public_key(question: list[bytes]) -> str | None:
    """What the peer has proved; None if it is not a question that ZeroMQ asks about CURVE."""
    if len(question) != _NUM_FIELDS or question[0] != _VERSION or question[5] != b"CURVE":
        return None
    return z85.encode(question[6]).decode()
