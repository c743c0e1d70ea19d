"""Namespaces that are joined by the wire: what the rules say happens to real packets."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvberth.drills.namespaces import JUDGE, Namespaces, why_no_namespaces
from kvberth.drills.wire import paths

WHY_NOT = why_no_namespaces()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"network namespaces: {WHY_NOT}")

SERVER = """
import socket, sys
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.bind((sys.argv[1], 5000))
print("ready", flush=True)
while True:
    packet, sender = end.recvfrom(10_000)
    end.sendto(packet, sender)
"""
CLIENT = """
import json, socket, sys, time
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.settimeout(0.3)
seconds = []
for _ in range(5):
    began = time.monotonic()
    end.sendto(bytes(1000), (sys.argv[1], 5000))
    try:
        end.recv(10_000)
        seconds.append(time.monotonic() - began)
    except TimeoutError:
        pass
print(json.dumps(seconds))
"""


@pytest.fixture(scope="module")
def network():
    """Two namespaces; one of them has a server that echoes."""
    with Namespaces(["client", "server"], seed=1) as network:
        command = [*network.prefix("server"), sys.executable, "-c", SERVER, network.address("server")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            yield network
            server.kill()


def echoes(network: Namespaces, name: str = "client") -> list[float]:
    """How long each of five packets took there and back, those that came."""
    prefix = () if name == JUDGE else network.prefix(name)
    done = subprocess.run(
        [*prefix, sys.executable, "-c", CLIENT, network.address("server")], capture_output=True, text=True, check=True
    )
    return list(json.loads(done.stdout))


@pytest.mark.parametrize("name", ["client", JUDGE])
def test_without_rules_everybody_reaches_everybody(network, name):
    """From a namespace, and from outside, where the load generator is."""
    network.set_rules([])
    assert len(echoes(network, name)) == 5


def test_a_cut_is_between_two_only(network):
    """Who is not named notices nothing."""
    before = network.set_rules(paths(("server",), ("client",), loss=1.0))
    assert echoes(network) == []
    assert len(echoes(network, JUDGE)) == 5
    assert network.set_rules([]) >= before + 5
    assert len(echoes(network)) == 5


def test_a_delay_is_felt(network):
    """Once in each direction that has the rule."""
    network.set_rules(paths(("server",), ("client",), delay_seconds=0.1))
    assert len(seconds := echoes(network)) == 5
    assert min(seconds) >= 0.1


def test_nothing_is_left_behind():
    """Neither namespaces nor devices, also after an error."""
    network = Namespaces(["a", "b"], seed=1)
    device = network.device(JUDGE)

    def fail() -> None:
        with network:
            assert Path("/sys/class/net", device).exists()
            raise OSError("the cluster does not start")

    with pytest.raises(OSError, match="the cluster does not start"):
        fail()
    deadline = time.monotonic() + 5
    while Path("/sys/class/net", device).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert network.prefix("a")[-1] not in left
