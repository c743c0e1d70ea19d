"""Whether a package that we pin has a known vulnerability: `make audit`. Says so, too, where nobody could be asked.

pip-audit asks the advisories of the package index, or else OSV's. Behind a mirror that has packages only, or without a
network, neither knows anything, and pip-audit takes that for good news. So the first question is one whose answer is
known: a release that has had advisories for years.

Ends with 0 if nothing is known against any pin, with 1 if something is, and with 2 if there was nobody to ask.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from setup_env import LATEST_LOCK, LOCK, ROOT, TOOLS_LOCK, TORCH_LOCK

SOURCES = ("pypi", "osv")
LOCKS = {LOCK: TORCH_LOCK, LATEST_LOCK: None, TOOLS_LOCK: None}
KNOWN_TO_BE_BAD = "jinja2==2.4.1"


def main() -> int:
    source = next((each for each in SOURCES if knows_advisories(each)), None)
    if source is None:
        print(
            f"error: no advisories could be asked for ({', '.join(SOURCES)}): NOTHING has been audited", file=sys.stderr
        )
        return 2
    num_bad = num_unknown = 0
    for lock, torch_lock in LOCKS.items():
        pins = pins_of(lock) + (pins_of(torch_lock) if torch_lock is not None else [])
        found = ask(source, pins)
        bad = [each for each in found if each.get("vulns")]
        unknown = [each["name"] for each in found if "skip_reason" in each]
        print(f"{lock.relative_to(ROOT)}: {len(pins)} pins, {len(bad)} with known vulnerabilities ({source})")
        for each in bad:
            for vulnerability in each["vulns"]:
                fixed = ", ".join(vulnerability["fix_versions"]) or "nowhere yet"
                print(f"  {each['name']} {each['version']}: {vulnerability['id']}, fixed in {fixed}")
        if unknown:
            print(f"  not known to {source}: {', '.join(unknown)}")
        num_bad, num_unknown = num_bad + len(bad), num_unknown + len(unknown)
    return 1 if num_bad else 2 if num_unknown else 0


def knows_advisories(source: str) -> bool:
    """Whether this source can be reached, and tells what it should."""
    return any(each.get("vulns") for each in ask(source, [KNOWN_TO_BE_BAD]))


def pins_of(lock: Path) -> list[str]:
    """`name==version` of each; what a build is for (`+cpu`) is not part of a version that has advisories."""
    return re.findall(r"^([\w.-]+==[\w.!-]+)", lock.read_text(), re.MULTILINE)


def ask(source: str, pins: list[str]) -> list[dict[str, Any]]:
    """pip-audit's word on each pin; none if it has none."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "pins.txt"
        wanted.write_text("\n".join(pins))
        command = [str(Path(sys.executable).with_name("pip-audit")), "--vulnerability-service", source]
        command += ["--requirement", str(wanted), "--no-deps", "--disable-pip"]
        command += ["--format", "json", "--progress-spinner", "off"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return []
    return found


if __name__ == "__main__":
    sys.exit(main())
