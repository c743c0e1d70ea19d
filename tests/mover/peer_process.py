"""A prefill worker in a process of its own: a real mover over NIXL and ZeroMQ. Run by `test_two_processes`.

Reads one command per line from stdin (`announce ID`, `finish ID`, `stop`) and writes what happens to stdout:
`released ID`, `connected ENGINE`, `lost ENGINE`. `offer BLOCKS ID` is a `finish` of an engine that does not know its
own blocks.
"""

import logging
import sys
import threading
import time
import uuid
from pathlib import Path

import msgspec
import numpy as np
from tests.mover.rig import FINGERPRINT

from kvberth.keys import Keyring, read_key_pair
from kvberth.layout import Region
from kvberth.mover import AnnouncePrefill, FinishPrefill, Mover
from kvberth.protocol import EngineCard, Timing, TransferKey
from kvberth.protocol.events import PrefillAnnounced, PrefillFinished
from kvberth.protocol.ids import RequestId
from kvberth.transport.nixl import MemoryType, NixlTransport

NUM_BLOCKS, BLOCK_BYTES = 64, 4096
TIMING = Timing(lease_seconds=5.0, heartbeat_seconds=0.4, silence_seconds=1.6, connect_seconds=1.5)


def make_mover(name: str, memory: np.ndarray, listen: tuple[str, int] | None, keyring: Keyring | None = None) -> Mover:
    """A mover for two layers of memory, shape (2, NUM_BLOCKS, BLOCK_BYTES), uint8."""
    incarnation = uuid.uuid4().hex
    regions = tuple(
        Region(address=layer.ctypes.data, block_stride=BLOCK_BYTES, block_length=BLOCK_BYTES) for layer in memory
    )

    def make_transport() -> NixlTransport:
        transport = NixlTransport(f"{name}/{incarnation}", MemoryType.HOST)
        transport.register(regions, NUM_BLOCKS)
        return transport

    def make_card(agent_metadata: bytes) -> EngineCard:
        return EngineCard(
            engine_id=name,
            incarnation=incarnation,
            rank=0,
            fingerprint=msgspec.structs.replace(FINGERPRINT, block_lengths=(BLOCK_BYTES, BLOCK_BYTES)),
            regions=regions,
            num_blocks=NUM_BLOCKS,
            agent_metadata=agent_metadata,
        )

    return Mover(make_transport, make_card, listen, TIMING, keyring)


def value_of(transfer_id: str, block: int) -> int:
    """The byte that fills a block of a transfer: what D must find."""
    return (sum(transfer_id.encode()) * 31 + block * 7) % 251


class _Connections(logging.Handler):
    """What the mover logs of its consumers, as lines."""

    def emit(self, record: logging.LogRecord) -> None:
        if "is connected" in record.msg or "is lost" in record.msg:
            what = "connected" if "connected" in record.msg else "lost"
            print(f"{what} {record.args[0]}", flush=True)


def main(port: int, keys_dir: str = "") -> None:
    """Serve commands until stdin ends. With a directory of keys, as the engine `P` in it."""
    logging.getLogger("kvberth").addHandler(_Connections())
    logging.getLogger("kvberth").setLevel(logging.INFO)
    memory = np.zeros((2, NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    keyring = Keyring(read_key_pair(Path(keys_dir) / "P.key_secret"), Path(keys_dir)) if keys_dir else None
    mover = make_mover("P", memory, ("127.0.0.1", port), keyring)
    mover.start()
    print("ready", flush=True)

    def watch() -> None:
        while True:
            for request_id in mover.take().released:
                print(f"released {request_id}", flush=True)
            time.sleep(0.005)

    threading.Thread(target=watch, daemon=True).start()
    for line in sys.stdin:
        verb, _, transfer_id = line.strip().partition(" ")
        if verb == "stop":
            break
        if verb == "offer":
            offered, _, transfer_id = transfer_id.partition(" ")
        key = TransferKey(transfer_id)
        if verb == "offer":
            mover.submit(FinishPrefill((key,), PrefillFinished(tuple(map(int, offered.split(","))))))
        elif verb == "announce":
            mover.submit(AnnouncePrefill((key,), PrefillAnnounced(RequestId(transfer_id), 40, b"digest")))
        else:
            blocks = (5, 4, 9)
            for position, block in enumerate(blocks):
                memory[:, block] = value_of(transfer_id, position)
            mover.submit(FinishPrefill((key,), PrefillFinished(blocks)))
    mover.stop()
    print("stopped", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
