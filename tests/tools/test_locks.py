"""What is installed is what was locked, and what is said of it is true."""

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
HASHED = [path for path in LOCKS if path.name != "torch.lock"]


@pytest.fixture
def tool(monkeypatch):
    """A program of `tools/`, which find each other there."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    yield importlib.import_module
    for name in ("audit", "lock", "setup_env"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("path", HASHED, ids=lambda path: path.name)
def test_every_pin_has_the_hash_of_its_file(path):
    """So that pip refuses any other one; one pin per name, and no word of where it comes from."""
    text = path.read_text().replace("\\\n", " ")
    names = []
    for line in text.splitlines()[1:]:
        pin = re.fullmatch(r"([a-z0-9-]+)==[\w.!]+((?:\s+--hash=sha256:[0-9a-f]{64})+)\s*", line)
        assert pin is not None, line
        names.append(pin[1])
    assert names
    assert len(set(names)) == len(names)
    assert "://" not in text


def test_pytorch_alone_has_none():
    """Its CPU build comes from different places; the lock says so."""
    assert {path.name for path in LOCKS} - {path.name for path in HASHED} == {"torch.lock"}
    assert "Without a hash" in (ROOT / "requirements" / "torch.lock").read_text()


def test_hashes_are_demanded_when_packages_are_installed(tool, monkeypatch, tmp_path):
    """Of every environment, whatever pip's own settings are."""
    setup_env = tool("setup_env")
    commands = []
    monkeypatch.setattr(setup_env, "run", lambda stage, command: commands.append(command))
    monkeypatch.setattr(setup_env, "LOG", tmp_path / "logs" / "setup.log")
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    for environment in (setup_env.CPU, setup_env.LATEST, setup_env.TOOLS):
        here = tmp_path / environment.folder.name
        here.mkdir()
        lock, torch_lock = tmp_path / environment.lock.name, environment.torch_lock
        lock.touch()
        commands.clear()
        setup_env.set_up(setup_env.Environment(here, lock, torch_lock, environment.imports), sys.executable)
        (install,) = [each for each in commands if str(lock) in each]
        assert "--require-hashes" in install


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("a-1-cp312-cp312-manylinux_2_28_x86_64.whl", True),
        ("a-1-cp38-abi3-manylinux1_x86_64.whl", True),
        ("a-1-cp313-cp313-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp311-cp311-musllinux_1_2_x86_64.whl", False),
        ("a-1-cp311-cp311-manylinux_2_28_aarch64.whl", False),
        ("a-1-cp311-cp311-macosx_11_0_arm64.whl", False),
    ],
)
def test_hashes_are_of_files_for_our_platforms(tool, name, is_kept):
    """Linux on x86_64 with each supported Python, and any C library of GNU's; the source where one has no wheel."""
    fallback = {"url": "somewhere/a-1.tar.gz", "hashes": {"sha256": "source"}}
    package = {"name": "a", "wheels": [{"url": f"somewhere/{name}", "hashes": {"sha256": "wheel"}}], "sdist": fallback}
    hashes = tool("lock").hashes_of(package)
    assert ("wheel" in hashes) is is_kept
    fits_both = is_kept and not re.search("-cp31[12]-cp31", name)
    assert ("source" in hashes) is not fits_both


def answering(**advisories):
    """pip-audit that knows these: by name `[ids]`, or None for what it cannot be asked."""

    def ask(source, pins):
        said = []
        for pin in pins:
            name, _, version = pin.partition("==")
            ids = advisories.get(name.replace("-", "_"), [])
            vulnerabilities = [{"id": each, "fix_versions": ["9"]} for each in ids or ()]
            asked = {"version": version, "vulns": vulnerabilities}
            said.append({"name": name, **({"skip_reason": "not found"} if ids is None else asked)})
        return said

    return ask


@pytest.mark.parametrize(
    ("advisories", "status", "words"),
    [
        ({"jinja2": []}, 2, "NOTHING has been audited"),
        ({"jinja2": None}, 2, "NOTHING has been audited"),
        ({"jinja2": ["CVE-1"], "idna": None}, 1, "not known to pypi: idna"),
        ({"jinja2": ["CVE-1"]}, 1, "CVE-1, fixed in 9"),
    ],
)
def test_an_audit_is_good_news_only_if_somebody_was_asked(tool, monkeypatch, capsys, advisories, status, words):
    """A mirror that knows no advisories is no clean bill; one known to be bad is what shows the difference."""
    audit = tool("audit")
    monkeypatch.setattr(audit, "ask", answering(**advisories))
    assert audit.main() == status
    said = capsys.readouterr()
    assert words in said.out + said.err


def test_an_audit_without_findings(tool, monkeypatch, capsys, tmp_path):
    """Every pin of every lock is asked for, PyTorch's without what it was built for."""
    audit = tool("audit")
    asked = []
    ask = answering(jinja2=["CVE-1"])
    known_bad = audit.KNOWN_TO_BE_BAD

    def ask_and_note(source, pins):
        asked.extend(pins)
        return ask(source, pins) if pins == [known_bad] else [{"name": pin, "vulns": []} for pin in pins]

    monkeypatch.setattr(audit, "ask", ask_and_note)
    assert audit.main() == 0
    assert "torch==2" in " ".join(asked)
    assert not any("+" in pin for pin in asked)
    locked = {line.split()[0] for path in HASHED for line in path.read_text().splitlines() if re.match(r"[a-z]", line)}
    assert locked <= set(asked)
