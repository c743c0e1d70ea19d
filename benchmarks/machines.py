"""What one event costs the producer's machine, with few and with many live transfers beside it.

`python -m benchmarks.machines [--out FILE]`; seconds. No I/O: the machine alone, as the mover's thread drives it.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from rich.console import Console

from kvberth.bench.machine import machine
from kvberth.protocol import Producer, Timing, TransferKey, TransferMode
from kvberth.protocol.events import (
    PrefillAdvanced,
    PrefillAnnounced,
    PrefillFinished,
    RegisterReceived,
    WritesDone,
)
from kvberth.protocol.ids import PeerName, RequestId
from kvberth.protocol.messages import Register

BLOCK_SIZE, BLOCKS, DIGEST = 16, 64, b"digest"
PEERS = [PeerName(f"D{number}/0/a") for number in range(8)]


class Side:
    """A machine with so many live transfers, half of them held, half of them being computed for a decode worker."""

    def __init__(self, num_live: int) -> None:
        self.producer = Producer(BLOCK_SIZE, Timing(lease_seconds=1e9, memory_seconds=1.0))
        self.now = 0.0
        self.number = 0
        for number in range(num_live):
            key = self._announce()
            if number % 2:
                self._register(key)
            else:
                self.producer.handle(key, PrefillFinished(tuple(range(BLOCKS))), self.now)

    def _announce(self) -> TransferKey:
        self.number += 1
        key = TransferKey(f"t-{self.number}")
        event = PrefillAnnounced(RequestId(f"p-{self.number}"), BLOCK_SIZE * BLOCKS, DIGEST)
        self.producer.handle(key, event, self.now)
        return key

    def _register(self, key: TransferKey) -> None:
        message = Register(
            key=key,
            attempt=0,
            mode=TransferMode.PUSH,
            first_token=0,
            num_tokens=BLOCK_SIZE * BLOCKS,
            prompt_digest=DIGEST,
            block_size=BLOCK_SIZE,
            blocks=tuple(range(BLOCKS * self.number, BLOCKS * (self.number + 1))),  # of this request alone
        )
        self.producer.handle(key, RegisterReceived(PEERS[self.number % len(PEERS)], message), self.now)

    def lives(self, count: int) -> int:
        """So many transfers from their first to their last event, deadlines included; the number of events."""
        events = 0
        for _ in range(count):
            key = self._announce()
            self._register(key)
            for first in range(0, BLOCKS, 16):
                blocks = tuple(range(first, first + 16))
                self.producer.handle(key, PrefillAdvanced(first, blocks, first + 16 == BLOCKS), self.now)
            self.producer.handle(key, PrefillFinished(tuple(range(BLOCKS))), self.now)
            self.producer.handle(key, WritesDone(1, 1), self.now)
            self.now += 0.01
            self.producer.next_deadline()
            self.producer.fire(self.now, self.now)
            events += 9
        return events


def main() -> None:
    """Measure in turns and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--live", type=int, nargs="+", default=[10, 1000, 10_000])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sides = {num_live: Side(num_live) for num_live in options.live}
    samples: dict[int, list[float]] = {num_live: [] for num_live in options.live}
    for _ in range(options.repetitions):
        for num_live, side in sides.items():
            began = time.process_time()
            events = side.lives(300)
            samples[num_live].append(1e6 * (time.process_time() - began) / events)
    medians = {num_live: statistics.median(each) for num_live, each in samples.items()}
    few = medians[min(medians)]
    for num_live, median in medians.items():
        Console().print(
            f"{num_live:>6} live transfers: {median:.2f} us of CPU per event, {median / few:.2f} of the few"
        )
    if options.out is not None:
        options.out.write_text(json.dumps({"machine": machine(), "us_per_event": samples}, indent=1))


if __name__ == "__main__":
    main()
