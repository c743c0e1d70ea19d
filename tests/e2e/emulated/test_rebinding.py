"""A decode worker that is chosen again in mid-prefill; the legs are sent by hand."""

import time

import numpy as np
from tests.e2e.emulated.test_cluster import MODEL, counter, settings
from tests.e2e.legs import Legs, told

PROMPT = np.random.default_rng(7).integers(1000, 20000, 12000).tolist()
CHUNK = 32


def test_the_second_decode_worker_gets_it_all(pool):
    """The first one is superseded and computes for itself; both give the right answer, and no word is wrong."""
    # A prompt is read in 375 steps, which take about 1.7 s: the second choice comes long before their end.
    cluster = pool.get(settings(decode=2, engine_args=("--max-num-batched-tokens", str(CHUNK))))
    first, second = cluster.decode
    with Legs(MODEL, cluster.prefill[0]) as legs:
        expected = legs.ask(second, PROMPT)["choices"][0]["text"]
        verified = counter(cluster, "verified_tokens")
        superseded = legs.decode(first, PROMPT, "twice", attempt=0)
        time.sleep(0.2)
        prefilled = legs.prefill(PROMPT, "twice")
        time.sleep(0.3)
        bound = legs.decode(second, PROMPT, "twice", attempt=1)
        for leg in (superseded, bound):
            assert leg.result()["choices"][0]["text"] == expected
    assert told(bound.result())["ok"]
    assert told(superseded.result())["reason"] == "newer_attempt"
    assert prefilled.result()["kv_transfer_params"]["transfer_id"] == legs.transfer_id("twice")
    assert counter(cluster, "verified_tokens") - verified == len(PROMPT) - 1
    assert counter(cluster, "corruptions") == 0
