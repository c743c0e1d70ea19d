"""What the emulator makes of NIXL, in a process of its own since NIXL's classes are changed in place.

Run by `test_nixl_agent` as `python -m tests.emulator.nixl_program NAME JSON`; the last line of stdout is what it saw.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvberth.emulator import load_profile, nixl_agent
from kvberth.emulator.faults import FaultFile
from kvberth.emulator.settings import EmulatorSettings

PATIENCE = 10.0
ROWS, ROW_BYTES = 16, 65_536


def install(*, link: bool, delay_us: int = 1000, seconds: float = 0.0, latency: float = 0.0, ranks: int = 1) -> None:
    """With a link on which all rows take so many seconds, and then the latency."""
    profile = load_profile("small")
    gigabits = ROWS * ROW_BYTES * profile.bytes_scale * 8 / 1e9
    wire = msgspec.structs.replace(
        profile.link, bandwidth_gbps=gigabits / seconds if seconds else 100.0, latency_us=latency * 1e6
    )
    settings = EmulatorSettings(link=link, nixl_progress_delay_us=delay_us)
    nixl_agent.install(settings, msgspec.structs.replace(profile, link=wire), ranks)


class End:
    """An agent with NIXL's default configuration, and its memory."""

    def __init__(self, name: str, fill: int = 0) -> None:
        from nixl._api import nixl_agent as agent_class
        from nixl._api import nixl_agent_config

        self.agent: Any = agent_class(f"{name}-{time.monotonic_ns()}", nixl_agent_config())
        self.memory = np.full((ROWS, ROW_BYTES), fill, dtype=np.uint8)
        whole = np.array([[self.memory.ctypes.data, self.memory.nbytes, 0]], dtype=np.uint64)
        self.agent.register_memory(whole, "DRAM")

    def rows(self, rows: list[int]) -> list[tuple[int, int, int]]:
        return [(self.memory[row].ctypes.data, ROW_BYTES, 0) for row in rows]

    def knows(self, other: "End") -> Any:
        return self.agent.add_remote_agent(other.agent.get_agent_metadata())

    def notices(self) -> list[str]:
        return [notice.decode() for each in self.agent.get_new_notifs().values() for notice in each]


class Pair:
    """Two agents that know each other."""

    def __init__(self) -> None:
        self.one, self.two = End("one", fill=1), End("two", fill=2)
        self.peer = self.one.knows(self.two)
        self.two.knows(self.one)

    def handle(self, operation: str, how: str, notice: bytes, here: list[int], there: list[int]) -> Any:
        """As our connector makes one (array), as an application might (list), or as vLLM's connectors do (prepped)."""
        agent = self.one.agent
        if how == "prepped":
            everything = list(range(ROWS))
            local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", agent.get_xfer_descs(self.one.rows(everything), "DRAM"))
            remote = agent.prep_xfer_dlist(self.peer, agent.get_xfer_descs(self.two.rows(everything), "DRAM"))
            return agent.make_prepped_xfer(
                operation,
                local,
                np.array(here, dtype=np.int32),
                remote,
                np.array(there, dtype=np.int32),
                notif_msg=notice,
            )
        rows: list[Any] = [self.one.rows(here), self.two.rows(there)]
        if how == "array":
            rows = [np.array(each, dtype=np.uint64) for each in rows]
        local, remote = (agent.get_xfer_descs(each, "DRAM") for each in rows)
        # NIXL gives names as bytes, and takes both: vLLM's connectors hand them on as they are, ours decodes them.
        peer = self.peer.decode() if how == "array" and isinstance(self.peer, bytes) else self.peer
        return agent.initialize_xfer(operation, local, remote, peer, notice)

    def watch(self, handles: list[Any], began: float, notices: int, linger: float = 0.0) -> dict[str, Any]:
        """When each was done, and when each notice came, in seconds since; until all have, and a while longer."""
        done: dict[int, float] = {}
        arrived: list[tuple[str, float]] = []
        until = began + PATIENCE
        while time.monotonic() < until:
            for index, handle in enumerate(handles):
                before = time.monotonic()
                if index not in done and (state := self.one.agent.check_xfer_state(handle)) != "PROC":
                    assert state == "DONE", state
                    done[index] = before - began
            before = time.monotonic()
            arrived += [(each, before - began) for each in self.two.notices()]
            if len(done) == len(handles) and len(arrived) >= notices:
                until = min(until, time.monotonic() + linger)
                if not linger:
                    break
            time.sleep(0.002)
        return {"done": [done.get(index) for index in range(len(handles))], "notices": arrived}


def rest(delay_us: int | None) -> Any:
    """Processor time of a second in which an agent has nothing to do; None leaves NIXL as it is."""
    if delay_us is not None:
        install(link=False, delay_us=delay_us)
    end = End("idle")
    before = time.process_time()
    time.sleep(1.0)
    assert end.agent is not None
    return time.process_time() - before


def faults(post: float, transfer: float, at_once: bool) -> Any:
    """What becomes of a WRITE with such shares of faults, and of one after they are over; perhaps done when posted."""
    if at_once:
        wait_in_post()
    path = Path(tempfile.mkdtemp()) / "faults"
    shares = FaultFile.create(path)
    nixl_agent.install(EmulatorSettings(faults=str(path)), load_profile("small"), 1)
    pair, seen = Pair(), []
    for _ in range(2):
        shares.set(post=post, transfer=transfer)
        handle = pair.handle("WRITE", "array", b"", [1], [2])
        try:
            state = pair.one.agent.transfer(handle)
            while state == "PROC":
                state = pair.one.agent.check_xfer_state(handle)
            seen.append(state)
        except Exception as error:
            seen.append(type(error).__name__)
        pair.one.agent.release_xfer_handle(handle)
        post = transfer = 0.0
    return seen


def wait_in_post() -> None:
    """From now on NIXL is so fast that what it was given to post is done then."""
    from nixl._api import nixl_agent as agent_class

    post, check = agent_class.transfer, agent_class.check_xfer_state

    def transfer(agent: Any, handle: Any, notif_msg: bytes = b"") -> str:
        state = post(agent, handle, notif_msg)
        while state == "PROC":
            state = check(agent, handle)
        return str(state)

    agent_class.transfer = transfer


def moves(link: bool, hows: list[str], notice: str, seconds: float, latency: float) -> Any:
    """Rows 1, 2 and 5 of one against 7, 8 and 3 of two, in each direction and in these ways, one after another."""
    install(link=link, seconds=seconds, latency=latency)
    pair, here, there = Pair(), [1, 2, 5], [7, 8, 3]
    results = {}
    for how in hows:
        for operation in ("WRITE", "READ"):
            pair.one.memory[:], pair.two.memory[:] = 1, 2
            handle = pair.handle(operation, how, notice.encode(), here, there)
            began = time.monotonic()
            state = pair.one.agent.transfer(handle)
            seen = pair.watch([handle], began, 1 if notice else 0, linger=0.1)
            pair.one.agent.release_xfer_handle(handle)
            changed, rows, fill = (pair.two, there, 1) if operation == "WRITE" else (pair.one, here, 2)
            expected = np.full_like(changed.memory, 3 - fill)
            expected[rows] = fill
            results[f"{operation} {how}"] = {
                "state": state,
                "is_moved": bool((changed.memory == expected).all()),
                **seen,
            }
    return results


def turns(seconds: float) -> Any:
    """Two transfers of all rows from one to the other, posted together, and one in the other direction."""
    install(link=True, seconds=seconds)
    pair, everything = Pair(), list(range(ROWS))
    handles = [
        pair.handle(operation, "array", notice, everything, everything)
        for operation, notice in (("WRITE", b"first"), ("WRITE", b"second"), ("READ", b"back"))
    ]
    began = time.monotonic()
    for handle in handles:
        pair.one.agent.transfer(handle)
    return pair.watch(handles, began, 3)


def again(seconds: float) -> Any:
    """One handle, posted twice with notices of their own."""
    install(link=True, seconds=seconds)
    pair, everything = Pair(), list(range(ROWS))
    handle = pair.handle("WRITE", "array", b"", everything, everything)
    seen = []
    for notice in (b"first", b"second"):
        began = time.monotonic()
        pair.one.agent.transfer(handle, notice)
        seen.append(pair.watch([handle], began, 1))
    return seen


def ranks() -> Any:
    """All rows over a link which two ranks share."""
    install(link=True, seconds=0.1, ranks=2)
    pair, everything = Pair(), list(range(ROWS))
    handle = pair.handle("WRITE", "array", b"", everything, everything)
    began = time.monotonic()
    pair.one.agent.transfer(handle)
    return pair.watch([handle], began, 0)


def failed() -> Any:
    """The real transfer ends in an error after it was posted."""
    from nixl._api import nixl_agent as agent_class

    agent_class.check_xfer_state = lambda self, handle: "ERR"
    install(link=True, seconds=0.1)
    pair = Pair()
    handle = pair.handle("WRITE", "array", b"never", [1], [1])
    pair.one.agent.transfer(handle)
    state = pair.one.agent.check_xfer_state(handle)
    return {"state": state, **pair.watch([], time.monotonic(), 1, linger=0.5)}


def released() -> Any:
    """A transfer is given up before it is due."""
    install(link=True, seconds=0.2)
    pair, everything = Pair(), list(range(ROWS))
    handle = pair.handle("WRITE", "array", b"never", everything, everything)
    pair.one.agent.transfer(handle)
    pair.one.agent.release_xfer_handle(handle)
    end, arrived = time.monotonic() + 0.6, []
    while time.monotonic() < end:
        arrived += pair.two.notices()
        time.sleep(0.005)
    return {"notices": arrived}


def twice() -> Any:
    """The second `install` finds its work done: what it asks for changes nothing."""
    install(link=False)
    from nixl._api import nixl_agent as agent_class

    before = agent_class.transfer
    install(link=True, seconds=5.0)
    return agent_class.transfer is before


PROGRAMS = {each.__name__: each for each in (rest, faults, moves, turns, again, ranks, failed, released, twice)}

if __name__ == "__main__":
    print(json.dumps(PROGRAMS[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)
