"""What the router tells prefill workers on their control channel."""

import socket
from contextlib import closing

import zmq

from kvberth.protocol import Reason, TransferKey, decode
from kvberth.protocol.messages import Cancel
from kvberth.router.control import Control
from kvberth.router.engines import EngineInfo, Role


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def info(port: int, tp_size: int = 1) -> EngineInfo:
    return EngineInfo(Role.PREFILL, "engine-0", "127.0.0.1", port, tp_size)


def test_abandoned_transfer_is_told_to_each_rank():
    """One `Cancel` per rank and consumer, at the ports that follow each other."""
    with zmq.Context() as context, closing(Control()) as control:
        first = context.socket(zmq.ROUTER)
        port = first.bind_to_random_port("tcp://127.0.0.1")
        control.abandon(info(port), "t-1", 2)
        frames = [first.recv_multipart()[1] for _ in range(2) if first.poll(5000)]
        assert [decode(frame) for frame in frames] == [
            Cancel(TransferKey("t-1", index), 0, Reason.CONSUMER_GONE) for index in range(2)
        ]
        first.close(0)


def test_engine_that_is_gone_keeps_nobody_waiting():
    """Neither what is said, more than is queued for it, nor the end waits for it."""
    nobody = info(free_port())
    with closing(Control()) as control:
        for number in range(2000):
            control.abandon(nobody, f"t-{number}", 1)
