"""Probes of the machine: Python, operating system, memory, limits, ports. They read and change nothing.

Each takes what it judges as an argument whose default is this machine, so that a test can give it another one.
"""

import resource
import shutil
import socket
import sys
from pathlib import Path

import psutil

from kvberth.cli.doctor.check import Check, fail, ok, warn

__all__ = ["probe_memory", "probe_open_files", "probe_platform", "probe_port", "probe_python", "probe_shared_memory"]

_GIB = 2**30
_OLDEST_PYTHON = (3, 11)
_FIRST_PYTHON_TOO_NEW = (3, 15)  # for vLLM 0.32 and 0.33
_SCARCE_MEMORY_BYTES = 8 * _GIB  # two engines of a small model: each holds torch, weights and 1 GiB of KV cache
_SCARCE_SHARED_MEMORY_BYTES = 1 * _GIB
_SCARCE_OPEN_FILES = 8192  # the router's 2048 requests with one client connection and two legs each, and some more


def probe_python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """The range that both kvberth and its vLLM support."""
    found = ".".join(map(str, version))
    if version < _OLDEST_PYTHON:
        return fail("Python", found, "use Python 3.11 to 3.14")
    if version >= _FIRST_PYTHON_TOO_NEW:
        return warn("Python", found, "vLLM 0.32 and 0.33 support Python up to 3.14; use one of those for engines")
    return ok("Python", found)


def probe_platform(platform: str = sys.platform) -> Check:
    """vLLM and NIXL exist for Linux only."""
    if platform != "linux":
        return fail("system", platform, "run it on Linux, in a container or a virtual machine for example")
    return ok("system", platform)


def probe_memory(available_bytes: int | None = None) -> Check:
    """Whether two engines fit. On a machine with GPUs the KV cache is elsewhere, so little is no failure."""
    available = psutil.virtual_memory().available if available_bytes is None else available_bytes
    found = f"{available / _GIB:.1f} GiB available"
    if available < _SCARCE_MEMORY_BYTES:
        return warn("memory", found, f"two engines want about {_SCARCE_MEMORY_BYTES // _GIB} GiB; free some")
    return ok("memory", found)


def probe_shared_memory(folder: Path = Path("/dev/shm"), free_bytes: int | None = None) -> Check:  # noqa: S108
    """UCX and vLLM's own workers exchange data there; containers get 64 MiB unless told otherwise."""
    if not folder.is_dir():
        return fail("shared memory", f"no {folder}", f"mount a tmpfs on {folder}")
    free = shutil.disk_usage(folder).free if free_bytes is None else free_bytes
    found = f"{free / _GIB:.2f} GiB free in {folder}"
    if free < _SCARCE_SHARED_MEMORY_BYTES:
        return warn("shared memory", found, "give it 1 GiB or more; in Docker with --shm-size=4g or --ipc=host")
    return ok("shared memory", found)


def probe_open_files(limit: int | None = None) -> Check:
    """The router's connections, under its default bound on requests."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if soft == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    if soft < _SCARCE_OPEN_FILES:
        advice = f"ulimit -n {_SCARCE_OPEN_FILES} or more before a router that is to hold 2048 requests at once"
        return warn("open files", f"limit {soft}", advice)
    return ok("open files", f"limit {soft}")


def probe_port(name: str, port: int, advice: str, host: str = "127.0.0.1") -> Check:
    """Whether a default port is free. `advice` says how to take another one."""
    with socket.socket() as listener:
        # As servers do: connections of the last owner that still linger do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            return warn(name, f"{port}: {error.strerror}", advice)
    return ok(name, f"{port} is free")
