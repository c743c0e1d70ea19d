"""`python -m kvberth.drills.nursery_process`: has imported all that an engine needs, and forks one when it is told to.

    launcher --pipes--> nursery --fork--> vLLM's API server --> EngineCore

Imports are nearly all of what an emulated engine's start costs, and drills start engines hundreds of times. Otherwise
the nursery is to the engine what `kvberth.launch.guard` is: it ends the engine's family with the engine, and when the
launcher's pipe closes. It takes the engine's arguments as a JSON list per line of standard input, and says the engine's
status on standard output when it has ended. Standard error is the log of both.
"""

import ctypes
import gc
import importlib
import os
import select
import signal
import sys
import traceback
from pathlib import Path

import msgspec

from kvberth.drills.clock import CLOCK_FILE, bend
from kvberth.launch.guard import PR_SET_CHILD_SUBREAPER, end_family

__all__: list[str] = []

_IMPORTS = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.core",
    "nixl._api",
    "kvberth.vllm_plugin",
    "kvberth.emulator.worker",
)
"""What an engine imports until it serves; nothing here uses them."""


def main() -> None:
    """Fork engines, one after the other, until the pipe closes."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides, by closing the pipe
    orders, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # whatever is printed while modules are imported goes to the log
    _import_engine()
    gc.collect()
    gc.freeze()  # what is here stays, and is not looked at again by every engine
    while line := _read_line(orders):
        engine = os.fork()
        if engine == 0:
            os.close(orders)
            os.close(answers)
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _run(msgspec.json.decode(line, type=list[str]))
        ended = os.pidfd_open(engine)
        ready, _, _ = select.select([orders, ended], [], [])
        os.close(ended)
        if ended not in ready:
            break
        status = os.waitstatus_to_exitcode(os.waitpid(engine, 0)[1])
        end_family()
        os.write(answers, b"%d\n" % (status if status >= 0 else 128 - status))
    end_family()


def _import_engine() -> None:
    for module in _IMPORTS:
        importlib.import_module(module)


def _run(arguments: list[str]) -> None:
    """Be the engine, in the process that was forked for it; does not return."""
    status = 1
    try:
        sys.argv = ["api_server", *arguments]
        from vllm.entrypoints.launchers.api_server.entry import main as serve  # noqa: PLC0415

        serve()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _read_line(orders: int) -> bytes:
    """Empty when the pipe has been closed."""
    line = b""
    while not line.endswith(b"\n") and (piece := os.read(orders, 65536)):
        line += piece
    return line


if __name__ == "__main__":
    bend(Path(os.environ[CLOCK_FILE]))
    main()
