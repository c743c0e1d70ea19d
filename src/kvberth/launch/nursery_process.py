"""`python -m kvberth.launch.nursery_process`: has imported all that an engine needs, and forks those it is told to.

Standard input is a socket. Each `ForkOrder` that comes is carried out by a guard, forked from here, which forks the
engine, ends the engine's family with the engine or when the launcher's pipe closes, as `kvberth.launch.guard` does, and
says its own pid and in the end the engine's status. When the socket closes, nothing more will be forked; engines live
on.
"""

import ctypes
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path

import msgspec

from kvberth.emulator.clock import CLOCK_FILE, bend
from kvberth.launch.guard import PR_SET_CHILD_SUBREAPER, watch_over
from kvberth.launch.nursery import ForkOrder

__all__: list[str] = []

_ORDER_BYTES = 1 << 18
_API_SERVER = "vllm.entrypoints.openai.api_server"
_IMPORTS = (
    _API_SERVER,
    "vllm.v1.engine.core",
    "nixl._api",
    "kvberth.vllm_plugin",
    "kvberth.emulator.worker",
)
"""What an engine imports until it serves; nothing here uses them."""


def main() -> None:
    """Fork guards until the socket closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides, by closing the socket
    orders = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _import_engine()
    gc.collect()
    gc.freeze()  # what is here stays, and is not looked at again by every engine
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for guards
    while True:
        text, descriptors, _, _ = socket.recv_fds(orders, _ORDER_BYTES, 3)
        if not text:
            return
        if os.fork() == 0:
            orders.close()
            try:
                _guard(msgspec.json.decode(text, type=ForkOrder), *descriptors)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)


def _guard(order: ForkOrder, launcher: int, says: int, log: int) -> None:
    """Be the guard of one engine; returns after its end, or the launcher's."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(order.env)
    os.write(says, b"%d\n" % os.getpid())
    engine = os.fork()
    if engine == 0:
        os.close(launcher)
        os.close(says)
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _run(order.arguments)
    os.write(says, b"%d\n" % watch_over(engine, launcher))


def _import_engine() -> None:
    for module in _IMPORTS:
        importlib.import_module(module)


def _run(arguments: list[str]) -> None:
    """Be the engine, in the process that was forked for it; does not return."""
    status = 1
    try:
        if CLOCK_FILE in os.environ:
            bend(Path(os.environ[CLOCK_FILE]))
        sys.argv[1:] = arguments
        del sys.modules[_API_SERVER]  # it is to be run, and all that it imports is there
        runpy.run_module(_API_SERVER, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    if CLOCK_FILE in os.environ:
        bend(Path(os.environ[CLOCK_FILE]))  # of the first engine; each one's own is put in its place
    main()
