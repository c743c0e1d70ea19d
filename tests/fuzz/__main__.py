"""`python -m tests.fuzz TARGET`: many inputs to one target, guided by the branches that they reach.

What breaks something is written to `crash-...` in the folder that is given; put it into `tests/fuzz/corpus/TARGET` with
what mends it. Without atheris (`make fuzz` has it) inputs
are changed in the same ways, and nothing guides them.
"""

import argparse
import importlib
import logging
import random
import sys
import time
from pathlib import Path

try:
    import atheris
except ImportError:
    atheris = None

TARGETS = ("protocol", "traces", "requests")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz one target.")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("logs/fuzz"))
    arguments = parser.parse_args()
    logging.getLogger("kvberth").setLevel(logging.CRITICAL + 1)  # what goes wrong does so on purpose, and often
    folder = arguments.out / arguments.target
    folder.mkdir(parents=True, exist_ok=True)
    if atheris is not None:
        _guided(arguments.target, arguments.runs, arguments.seed, folder)
        return
    from tests.fuzz.playing import play

    began = time.monotonic()
    play(arguments.target, arguments.runs, random.Random(arguments.seed), folder)
    print(f"{arguments.target}: {arguments.runs} inputs in {time.monotonic() - began:.0f} s, none broke anything")


def _guided(name: str, runs: int, seed: int, folder: Path) -> None:
    """Ends the process: libFuzzer does, with 0 if nothing broke."""
    with atheris.instrument_imports(include=["kvberth"]):
        playing = importlib.import_module("tests.fuzz.playing")
    target, seeds = playing.TARGETS[name], playing.inputs_of(name)

    def mutate(data: bytes, max_size: int, draw_seed: int) -> bytes:
        return playing.vary(target, data, seeds, random.Random(draw_seed))[:max_size]

    found = folder / "corpus"  # where the next call goes on
    found.mkdir(exist_ok=True)
    for number, data in enumerate(seeds):
        (found / f"seed-{number}").write_bytes(data)
    options = [
        f"-atheris_runs={runs}",
        f"-seed={seed}",
        f"-artifact_prefix={folder}/",
        f"-max_len={playing.MOST_BYTES}",
        "-timeout=20",
    ]
    atheris.Setup(
        [sys.argv[0], *options, "-rss_limit_mb=4096", "-print_final_stats=1", str(found)],
        target.run,
        custom_mutator=mutate,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
