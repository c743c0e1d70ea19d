"""A program runs under a wall clock that a file sets."""

import os
import subprocess
import sys
import time

from kvberth.emulator.clock import ClockFile


def test_the_clock_of_a_program_follows_the_file(tmp_path):
    """Forwards and backwards, for those too that keep the function under a name of their own."""
    clock = ClockFile.create(tmp_path / "clock")
    (tmp_path / "program.py").write_text(
        "import sys, time\n"
        "from time import time as now\n"
        "assert sys.argv[1:] == ['--port', '1']\n"
        "for _ in sys.stdin:\n"
        "    print(now(), time.time_ns() / 1e9, time.monotonic(), flush=True)\n"
    )
    command = [sys.executable, "-m", "kvberth.emulator.clock", str(tmp_path / "clock"), sys.executable]
    with subprocess.Popen(
        [*command, "-m", "program", "--port", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        for offset in (0.0, 3600.0, -3600.0):
            clock.offset_seconds = offset
            began, steady = time.time(), time.monotonic()
            program.stdin.write("\n")
            program.stdin.flush()
            says = [float(each) for each in program.stdout.readline().split()]
            for wall in says[:2]:
                assert began + offset <= wall + 0.001
                assert wall <= time.time() + offset
            assert steady <= says[2] <= time.monotonic()
        program.stdin.close()
