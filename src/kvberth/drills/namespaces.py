"""Network namespaces, one per process of a cluster, joined by the wire. Needs root and `ip`.

    namespace prefill-0        namespace decode-0         this machine's own
    10.x.y.2 on a TUN device   10.x.y.3 on a TUN device   10.x.y.1 on a TUN device (load generator, judge)
              \\                         |                        /
               +------------------- wire_process -----------------+

A wire of our own stands in for the kernel's netem, which many kernels lack, and which could not tell apart two paths of
one device without a tree of filters. Packets take some tens of microseconds on it.
"""

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Sequence
from ipaddress import IPv4Address
from pathlib import Path
from types import TracebackType
from typing import Self

from kvberth.drills.helper import Helper, HelperError
from kvberth.drills.wire import Rule

__all__ = ["JUDGE", "NamespaceError", "Namespaces", "why_no_namespaces"]

JUDGE = "judge"
"""The name of this process's own end of the wire."""

_MTU_BYTES = 9000


class NamespaceError(RuntimeError):
    """The kernel refuses a namespace or a device; the text says which."""


def why_no_namespaces() -> str | None:
    """Why this process cannot make them, in a line for people; None if it can."""
    if shutil.which("ip") is None:
        return "needs the program ip (iproute2)"
    name = f"kvb-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
    except NamespaceError:
        return "needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN)"
    _ip("netns", "del", name)
    return None if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "needs /dev/net/tun"


class Namespaces:
    """A context manager that makes them and takes them away.

    Args:
        names: of the processes, at most 200.
        seed: of what the wire drops.

    Raises:
        NamespaceError: on entry, if the kernel refuses.
    """

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._names = list(names)
        self._seed = seed
        self._wire: Helper | None = None
        network = _free_network()
        self._tag = f"kvb{network}"
        base = IPv4Address("10.192.0.0") + network * 256
        self._addresses = {name: str(base + 1 + index) for index, name in enumerate([JUDGE, *self._names])}

    def address(self, name: str) -> str:
        """Of a process, or of `JUDGE`."""
        return self._addresses[name]

    def prefix(self, name: str) -> tuple[str, ...]:
        """What stands before a command that is to run there; it sees the devices there in /sys too, as UCX must."""
        return ("ip", "netns", "exec", self._namespace(name))

    def device(self, name: str) -> str:
        """The network device of a process."""
        return f"{self._tag}-{list(self._addresses).index(name)}"

    def set_rules(self, rules: Sequence[Rule]) -> int:
        """Replace the wire's rules; sources and targets are names of processes.

        Returns how many packets rules have hit until now.
        """
        assert self._wire is not None
        by_address = [
            {**_as_dict(each), "source": self.address(each.source), "target": self.address(each.target)}
            for each in rules
        ]
        return sum(self._wire.tell(by_address).values())

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException as error:
            self._remove()
            if isinstance(error, HelperError):
                raise NamespaceError(str(error)) from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove()

    def _make(self) -> None:
        ends = [f"{self.device(name)}={address}" for name, address in self._addresses.items()]
        self._wire = Helper("wire_process", [str(self._seed), *ends])
        for name, address in self._addresses.items():
            device = self.device(name)
            inside: tuple[str, ...] = ()
            if name != JUDGE:
                namespace = self._namespace(name)
                _ip("netns", "add", namespace)
                _ip("link", "set", "dev", device, "netns", namespace)
                inside = ("-n", namespace)
                _ip(*inside, "link", "set", "dev", "lo", "up")
            _ip(*inside, "addr", "add", f"{address}/24", "dev", device)
            _ip(*inside, "link", "set", "dev", device, "mtu", str(_MTU_BYTES), "up")

    def _remove(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        for name in self._names:
            if Path("/run/netns", self._namespace(name)).exists():
                with contextlib.suppress(NamespaceError):
                    _ip("netns", "del", self._namespace(name))

    def _namespace(self, name: str) -> str:
        return f"{self._tag}-{name}"


def _free_network() -> int:
    """Which of the 4,096 networks of 10.192.0.0/12 no other run on this machine has."""
    taken = {each.name.partition("-")[0] for each in Path("/sys/class/net").iterdir()}
    return random.choice([each for each in range(4096) if f"kvb{each}" not in taken])  # noqa: S311 - not a secret


def _as_dict(rule: Rule) -> dict[str, object]:
    return {name: getattr(rule, name) for name in Rule.__struct_fields__}


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NamespaceError(f"ip {' '.join(arguments)}: {' '.join(done.stderr.split())}")
