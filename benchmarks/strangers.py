"""What those who may not take part can cost those who do.

A prefill and a decode worker's movers, in a process each, with keys, hand over small transfers one after another. An
attacker in a third process does its worst, either against this prefill worker or, for comparison, against another one
that nobody uses: the same work for the same cores, so that what is left is what the target's mover loses. Pairs take
turns within one run.

    python -m benchmarks.strangers --out strangers.json       # 5 minutes

Kinds: connections that come to nothing; handshakes with keys that are not accepted; messages without a key; and a flood
of messages by a peer whose key *is* accepted.
"""

import argparse
import json
import multiprocessing
import socket
import statistics
import tempfile
import time
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq
from tests.mover.peer_process import BLOCK_BYTES, NUM_BLOCKS, make_mover
from tests.mover.test_two_processes import Peer, free_port

from kvberth.bench.machine import machine, versions
from kvberth.keys import KeyPair, Keyring, PeerRole, make_key_pair, read_key_pair, write_key_pair
from kvberth.mover import AwaitRequest
from kvberth.protocol import TransferKey, TransferMode, encode
from kvberth.protocol.events import RequestWaiting
from kvberth.protocol.ids import RequestId
from kvberth.protocol.messages import Heartbeat

KINDS = ("connections", "unaccepted keys", "no keys", "accepted flood")
HEARTBEAT = encode(Heartbeat())


def attack(kind: str, port: int, keys_dir: str, is_over: Event, num_done: Any) -> None:
    """Do it until it is over; `num_done` counts."""
    server = read_key_pair(Path(keys_dir) / "P.key_secret").certificate.public_key
    accepted = read_key_pair(Path(keys_dir) / "E.key_secret")
    context = zmq.Context()
    standing = _dial(context, port, server, accepted if kind == "accepted flood" else None)
    while not is_over.is_set():
        if kind == "connections":
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
                connection.send(b"rubbish" * 20)
            num_done.value += 1
        elif kind == "unaccepted keys":
            stranger = _dial(context, port, server, make_key_pair("x", PeerRole.ENGINE))
            monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            num_done.value += bool(monitor.poll(200))
            stranger.disable_monitor()
            monitor.close()
            stranger.close(0)
        else:
            with suppress(zmq.Again):
                for _ in range(100):
                    standing.send(HEARTBEAT, zmq.NOBLOCK)
                    num_done.value += 1
    standing.close(0)
    context.term()


def _dial(context: "zmq.Context[Any]", port: int, server: str, pair: KeyPair | None) -> Any:
    client = context.socket(zmq.DEALER)
    client.linger = 0
    if pair is not None:
        client.curve_serverkey = server.encode()
        client.curve_publickey = pair.certificate.public_key.encode()
        client.curve_secretkey = pair.secret_key.encode()
    client.connect(f"tcp://127.0.0.1:{port}")
    return client


class Decode:
    """The decode worker's mover, in this process."""

    def __init__(self, keys_dir: Path, peer: Peer) -> None:
        self._peer = peer
        self._count = 0
        memory = np.zeros((2, NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self._mover = make_mover("D", memory, None, Keyring(read_key_pair(keys_dir / "D.key_secret"), keys_dir))
        self._mover.start()

    def transfer(self) -> float:
        """Seconds from the registration to the report, of a prompt that P has."""
        self._count += 1
        transfer_id = f"t-{self._count}"
        self._peer.tell(f"announce {transfer_id}", f"finish {transfer_id}")
        time.sleep(0.01)
        event = RequestWaiting(RequestId(transfer_id), 0, TransferMode.PUSH, 0, 40, b"digest", (1, 2, 3))
        began = time.perf_counter()
        self._mover.submit(AwaitRequest(TransferKey(transfer_id), "127.0.0.1", self._peer.port, event, "P"))
        while not (received := self._mover.take(1.0).received):
            pass
        seconds = time.perf_counter() - began
        assert received[0].ok, received[0]
        return seconds

    def stop(self) -> None:
        self._mover.stop()


def window(decode: Decode, peer: Peer, kind: str, port: int, keys_dir: Path, seconds: float) -> dict[str, Any]:
    """One attack on `port` while transfers are made."""
    is_over, num_done = multiprocessing.Event(), multiprocessing.Value("q", 0)
    attacker = multiprocessing.Process(target=attack, args=(kind, port, str(keys_dir), is_over, num_done))
    attacker.start()
    time.sleep(0.5)
    before, began, done = _process_seconds(peer), time.monotonic(), num_done.value
    times = []
    while time.monotonic() - began < seconds:
        times.append(decode.transfer())
    elapsed = time.monotonic() - began
    record = {
        "transfers": times,
        "median_ms": 1e3 * statistics.median(times),
        "attacks_per_second": (num_done.value - done) / elapsed,
        "peer_cores": (_process_seconds(peer) - before) / elapsed,
    }
    is_over.set()
    attacker.join(10)
    return record


def _process_seconds(peer: Peer) -> float:
    return float(sum(psutil.Process(peer.process.pid).cpu_times()[:2]))


def main() -> None:
    """Measure, write the raw records, and print a summary."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    keys_dir = Path(tempfile.mkdtemp())
    for name in ("P", "D", "E"):
        write_key_pair(make_key_pair(name, PeerRole.ENGINE), keys_dir)
    target, other = Peer(free_port(), keys_dir), Peer(free_port(), keys_dir)
    decode = Decode(keys_dir, target)
    for _ in range(50):
        decode.transfer()
    records = []
    for repeat in range(arguments.repeats):
        for kind in arguments.kinds:
            order = [("target", target), ("elsewhere", other)]
            for where, attacked in order[:: 1 if repeat % 2 else -1]:
                record = window(decode, target, kind, attacked.port, keys_dir, arguments.seconds)
                records.append({"kind": kind, "where": where, "repeat": repeat, **record})
    decode.stop()
    target.close()
    other.close()
    arguments.out.write_text(json.dumps({"machine": machine(), "versions": versions(), "windows": records}))
    for kind in arguments.kinds:
        of_kind = [record for record in records if record["kind"] == kind]
        here, there = (
            sorted(record["median_ms"] for record in of_kind if record["where"] == where)
            for where in ("target", "elsewhere")
        )
        paired = [one / two for one, two in zip(*_by_repeat(of_kind), strict=True)]
        rate = statistics.median(record["attacks_per_second"] for record in of_kind if record["where"] == "target")
        cores = statistics.median(record["peer_cores"] for record in of_kind if record["where"] == "target")
        print(
            f"{kind:<16} {rate:8.0f}/s  median {statistics.median(here):.2f} ms, elsewhere "
            f"{statistics.median(there):.2f} ms, ratio {statistics.median(paired):.3f} "
            f"({min(paired):.3f} to {max(paired):.3f}), P {cores:.2f} cores"
        )


def _by_repeat(records: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    ordered = sorted(records, key=lambda record: record["repeat"])
    here = [record["median_ms"] for record in ordered if record["where"] == "target"]
    return here, [record["median_ms"] for record in ordered if record["where"] == "elsewhere"]


if __name__ == "__main__":
    main()
