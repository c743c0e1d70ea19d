"""What the emulator changes about NIXL, for all connectors of the process alike.

* The progress thread of an agent rests between two rounds. NIXL's Python API sets its rest to 0, with which each agent
  burns a core even when idle, and two engines on a small machine take it from each other. Our own connector has no
  progress thread and is not touched by this.
* With a file of faults (for drills), some transfers are refused or end with an error; see `faults.py`.
* With the link on, a transfer is posted as always, with all its descriptors and their cost, and counts as done no
  sooner than the modelled wire allows. Its notice to the other side, which NIXL would send with the last byte, is then
  sent behind it by one thread per process.

The classes of the `nixl` package are changed in place, since who imported them first does not matter that way.
"""

import functools
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvberth.emulator.faults import FaultFile
from kvberth.emulator.link import LineTable, Wire
from kvberth.emulator.profile import Profile
from kvberth.emulator.settings import EmulatorSettings

__all__ = ["install"]

logger = logging.getLogger("vllm.kvberth.emulator")

_POLL_SECONDS = 0.001


def install(settings: EmulatorSettings, profile: Profile, ranks: int) -> None:
    """Change NIXL in this process, once. Without NIXL there is nothing to change."""
    try:
        from nixl import _api, _bindings  # noqa: PLC0415
    except ImportError:
        return
    if getattr(_api, "_kvberth_emulator", False):
        return
    _api._kvberth_emulator = True
    strict = settings.link  # the thread that sends notices shares the agent with the connector's threads
    _bindings.nixlAgentConfig = _rested(
        _bindings.nixlAgentConfig,
        settings.nixl_progress_delay_us,
        _api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT.value if strict else None,
    )
    if settings.link:
        link = profile.link
        wire = Wire(LineTable(), link.bandwidth_gbps / ranks, link.latency_us, profile.bytes_scale)
        _Link(_api.nixl_agent, wire).install(_api.nixl_agent)
    if settings.faults:
        _Faults(_api.nixl_agent, FaultFile(Path(settings.faults)), _bindings.nixlBackendError).install(_api.nixl_agent)


def _rested(config_class: Any, delay_us: int, sync_mode: Any) -> Any:
    """The configuration of an agent, whose progress thread rests for `delay_us`."""

    class RestedConfig(config_class):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "pthrDelay":
                value = delay_us
            elif name == "syncMode" and sync_mode is not None:
                value = sync_mode
            super().__setattr__(name, value)

    return RestedConfig


class _Faults:
    """Refuses to post, and reports errors, as often as the file of faults says.

    An error is reported only of a transfer that has ended: nothing is in flight behind one that NIXL reports, either.
    """

    NAMES = ("transfer", "check_xfer_state")

    def __init__(self, agent_class: Any, faults: FaultFile, error_class: type[Exception]) -> None:
        self._real = {name: getattr(agent_class, name) for name in self.NAMES}
        self._faults = faults
        self._error_class = error_class

    def install(self, agent_class: Any) -> None:
        """Put the methods in place."""
        for name in self.NAMES:
            setattr(agent_class, name, _as_method(getattr(self, name)))

    def transfer(self, agent: Any, handle: Any, notif_msg: bytes = b"") -> Any:
        if self._faults.strikes("post"):
            raise self._error_class("a fault on demand")
        state = self._real["transfer"](agent, handle, notif_msg)
        return "PROC" if state == "DONE" else state  # a small one may be done by now; its end is told below, for all

    def check_xfer_state(self, agent: Any, handle: Any) -> Any:
        state = self._real["check_xfer_state"](agent, handle)
        return "ERR" if state == "DONE" and self._faults.strikes("transfer") else state


class _Modelled:
    """What a handle of NIXL stands for: how many bytes go from whom to whom, and the notice behind them."""

    def __init__(self, agent: Any, operation: str, peer: str | bytes, copied_bytes: int, notice: bytes) -> None:
        self.agent = agent
        self.peer = peer
        self.copied_bytes = copied_bytes
        self.notice = notice
        # NIXL gives a peer's name as bytes, and takes either.
        name = peer.decode() if isinstance(peer, bytes) else peer
        self.sender: str = agent.name if operation == "WRITE" else name
        self.receiver: str = name if operation == "WRITE" else agent.name
        self.due = 0.0
        self.lock = threading.Lock()
        self.is_released = False
        self.is_complete = threading.Event()


class _Notices(threading.Thread):
    """Completes transfers when they are due: sends the notice of those that have one."""

    def __init__(self, real_state: Any) -> None:
        super().__init__(name="kvb-emu-link", daemon=True)
        self._real_state = real_state
        self._due: list[tuple[float, int, Any, _Modelled]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()

    def add(self, handle: Any, modelled: _Modelled) -> None:
        with self._changed:
            heapq.heappush(self._due, (modelled.due, next(self._numbers), handle, modelled))
            self._changed.notify()

    def run(self) -> None:
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                _, _, handle, modelled = heapq.heappop(self._due)
            try:
                # The lock keeps the handle from being released in between.
                with modelled.lock:
                    state = "RELEASED" if modelled.is_released else self._real_state(modelled.agent, handle)
                if state == "PROC":
                    modelled.due = time.monotonic() + _POLL_SECONDS
                    self.add(handle, modelled)
                    continue
                if state == "DONE":
                    modelled.agent.send_notif(modelled.peer, modelled.notice)
            except Exception:
                # As on a broken wire: the other side hears nothing, and this side asks for the state itself.
                logger.exception("the notice of a transfer to %s could not be sent", modelled.peer)
            modelled.is_complete.set()


class _Link:
    """Stands in for methods of NIXL's agent, and completes their transfers when the wire says so.

    Its methods have the names of those that they stand in for, and get the agent as the first argument.
    """

    NAMES = (
        "get_xfer_descs",
        "prep_xfer_dlist",
        "make_prepped_xfer",
        "initialize_xfer",
        "transfer",
        "check_xfer_state",
        "release_xfer_handle",
        "release_dlist_handle",
    )

    def __init__(self, agent_class: Any, wire: Wire) -> None:
        self._real = {name: getattr(agent_class, name) for name in self.NAMES}
        self._wire = wire
        self._notices = _Notices(self._real["check_xfer_state"])
        # By the address of NIXL's own object, which a handle keeps for life; its class has no room for attributes.
        self._transfers: dict[int, _Modelled] = {}
        self._sides: dict[int, tuple[int, str | bytes]] = {}
        # By the identity of a list of descriptors, from its making to its use.
        self._sums: dict[int, int] = {}

    def install(self, agent_class: Any) -> None:
        """Put the methods in place, and begin to send notices."""
        self._notices.start()
        for name in self.NAMES:
            setattr(agent_class, name, _as_method(getattr(self, name)))

    def get_xfer_descs(self, agent: Any, descs: Any, mem_type: str | None = None) -> Any:
        made = self._real["get_xfer_descs"](agent, descs, mem_type)
        if isinstance(descs, np.ndarray):
            self._sums[id(made)] = int(descs[:, 1].sum())
        return made

    def prep_xfer_dlist(self, agent: Any, agent_name: str | bytes, xfer_list: Any, *args: Any, **kwargs: Any) -> Any:
        handle = self._real["prep_xfer_dlist"](agent, agent_name, xfer_list, *args, **kwargs)
        self._sums.pop(id(xfer_list), None)
        self._sides[handle._handle] = (int(xfer_list[0][1]), agent_name)
        return handle

    def make_prepped_xfer(
        self,
        agent: Any,
        operation: str,
        local_xfer_side: Any,
        local_indices: Any,
        remote_xfer_side: Any,
        remote_indices: Any,
        notif_msg: bytes = b"",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        handle = self._real["make_prepped_xfer"](
            agent, operation, local_xfer_side, local_indices, remote_xfer_side, remote_indices, b"", *args, **kwargs
        )
        length, _ = self._sides[local_xfer_side._handle]
        _, peer = self._sides[remote_xfer_side._handle]
        modelled = _Modelled(agent, operation, peer, len(local_indices) * length, notif_msg)
        self._transfers[handle._handle] = modelled
        return handle

    def initialize_xfer(
        self,
        agent: Any,
        operation: str,
        local_descs: Any,
        remote_descs: Any,
        remote_agent: str | bytes,
        notif_msg: bytes = b"",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        handle = self._real["initialize_xfer"](
            agent, operation, local_descs, remote_descs, remote_agent, b"", *args, **kwargs
        )
        self._sums.pop(id(remote_descs), None)
        size = self._sums.pop(id(local_descs), None)
        if size is None:
            # NIXL's list can be indexed, but has neither a length nor an end.
            size = sum(int(local_descs[index][1]) for index in range(local_descs.descCount()))
        self._transfers[handle._handle] = _Modelled(agent, operation, remote_agent, size, notif_msg)
        return handle

    def transfer(self, agent: Any, handle: Any, notif_msg: bytes = b"") -> str:
        modelled = self._transfers[handle._handle]
        state: str = self._real["transfer"](agent, handle)
        if state == "ERR":
            return state
        modelled.due = self._wire.completion_time(modelled.sender, modelled.receiver, modelled.copied_bytes)
        modelled.notice = notif_msg or modelled.notice
        modelled.is_complete.clear()
        if modelled.notice:
            self._notices.add(handle, modelled)
        return "PROC"

    def check_xfer_state(self, agent: Any, handle: Any) -> str:
        state: str = self._real["check_xfer_state"](agent, handle)
        modelled = self._transfers[handle._handle]
        if state != "DONE":
            return state
        is_due = modelled.is_complete.is_set() if modelled.notice else time.monotonic() >= modelled.due
        return "DONE" if is_due else "PROC"

    def release_xfer_handle(self, agent: Any, handle: Any) -> None:
        # Forgotten first: once it is free, NIXL may give the same address to another thread's transfer.
        modelled = self._transfers.pop(handle._handle, None)
        if modelled is None:
            self._real["release_xfer_handle"](agent, handle)
            return
        try:
            with modelled.lock:
                self._real["release_xfer_handle"](agent, handle)
                modelled.is_released = True
        except Exception:
            self._transfers[handle._handle] = modelled
            raise

    def release_dlist_handle(self, agent: Any, handle: Any) -> None:
        side = self._sides.pop(handle._handle, None)
        try:
            self._real["release_dlist_handle"](agent, handle)
        except Exception:
            if side is not None:
                self._sides[handle._handle] = side
            raise


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """For a class: called on an agent, it passes the agent on."""

    @functools.wraps(function)
    def method(agent: Any, *args: Any, **kwargs: Any) -> Any:
        return function(agent, *args, **kwargs)

    return method
