"""A decode worker in a process of its own that registers for one transfer and waits to be killed.

Arguments: the producer's port, the transfer's id, `push` or `pull`. Run by `test_two_processes`.
"""

import sys
import time

import numpy as np
from tests.mover.peer_process import BLOCK_BYTES, NUM_BLOCKS, make_mover

from kvberth.mover import AwaitRequest
from kvberth.protocol import TransferKey, TransferMode
from kvberth.protocol.events import RequestWaiting
from kvberth.protocol.ids import RequestId

if __name__ == "__main__":
    port, transfer_id, mode = int(sys.argv[1]), sys.argv[2], TransferMode(sys.argv[3])
    mover = make_mover("W", np.zeros((2, NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8), None)
    mover.start()
    event = RequestWaiting(RequestId(transfer_id), 0, mode, 0, 40, b"digest", (1, 2, 3))
    mover.submit(AwaitRequest(TransferKey(transfer_id), "127.0.0.1", port, event))
    time.sleep(60)
