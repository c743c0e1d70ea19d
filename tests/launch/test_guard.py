"""The guard, run as it is run: with the command as its arguments and the launcher's pipe as its standard input."""

import subprocess
import sys
import time

import psutil

# When it is asked to end, it has just made a child, in a session of its own, that nobody has asked.
STARTING = """
import os, signal, subprocess, sys, time

def end(*_):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(child.pid, flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(600)
"""


def test_child_born_while_it_ends_is_ended_too():
    """Ctrl-C while an engine starts does not cost the whole grace, after which all are killed."""
    command = [sys.executable, "-m", "kvberth.launch.guard", sys.executable, "-c", STARTING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as guard:
        assert guard.stdin is not None
        assert guard.stdout is not None
        assert guard.stdout.readline() == "ready\n"
        began = time.monotonic()
        guard.stdin.close()
        child = int(guard.stdout.readline())
        guard.wait(30)
        assert time.monotonic() - began < 8
    assert not psutil.pid_exists(child)
