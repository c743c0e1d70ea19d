"""What the source as a whole promises: which way imports point, and what each package shows."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvberth

SOURCE = Path(kvberth.__file__).parent
PACKAGES = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))

# What each package may import of ours, besides itself and `kvberth.__version__`.
DOWNWARDS = {
    "layout": set(),
    "keys": set(),
    "protocol": {"layout"},
    "transport": {"layout", "protocol"},
    "mover": {"layout", "protocol", "transport", "keys"},
    "vllm_plugin": {"layout", "protocol", "transport", "keys", "mover"},
    "emulator": set(),
    "router": {"layout", "protocol", "keys"},
    "bench": set(),
    "launch": {"layout", "protocol", "keys", "emulator", "router"},
    "compare": {"layout", "protocol", "keys", "emulator", "router", "bench", "launch"},
    "drills": {"layout", "protocol", "keys", "emulator", "router", "bench", "launch"},
    "cli": {
        *("layout", "protocol", "transport", "keys", "emulator", "router", "bench", "launch", "compare", "drills"),
    },
}

# The machines decide; others read clocks, open sockets, start threads and speak to engines.
NOT_IN_PROTOCOL = {"asyncio", "logging", "nixl", "socket", "threading", "time", "torch", "vllm", "zmq"}

# Readers that run what they read: what comes from a peer, a client or a file is data.
RUN_WHAT_THEY_READ = {
    "modules": {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve", "yaml"},
    "attributes": {"recv_pyobj", "read_pickle"},
    "calls": {("torch", "load"), ("np", "load"), ("numpy", "load"), ("", "eval"), ("", "exec"), ("", "compile")},
}

WALL_CLOCKS = {
    *(("time", name) for name in ("time", "time_ns", "localtime", "gmtime", "CLOCK_REALTIME")),
    *((owner, name) for owner in ("datetime", "date") for name in ("now", "utcnow", "today")),
}


def imports_of(path: Path) -> Iterator[str]:
    """Every module that the file imports, at its top or within a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here, and this test reads no others"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_within(package: str) -> set[str]:
    return {each for path in (SOURCE / package).rglob("*.py") for each in imports_of(path)}


def test_every_package_has_its_place():
    """A new package is put into the order before it lands."""
    assert set(PACKAGES) <= DOWNWARDS.keys()


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_downwards(package):
    """A package imports of ours only what lies below it; the connector and the router know nothing of each other."""
    ours = {each.split(".")[1] for each in imports_within(package) if each.startswith("kvberth.")}
    assert ours - {package, "__version__"} <= DOWNWARDS[package]


def test_the_order_has_no_cycle():
    """What a package may import may in turn import no more than the package itself."""
    for package, below in DOWNWARDS.items():
        assert all(DOWNWARDS[each] < below | {package} for each in below), package


@pytest.mark.parametrize("package", ["layout", "protocol"])
def test_the_machines_do_no_io(package):
    """The rules of the handoff are free of clocks, threads, sockets, logs and engines."""
    assert not {each.split(".")[0] for each in imports_within(package)} & NOT_IN_PROTOCOL


def test_one_module_imports_nixl():
    """NIXL's strings and exceptions become ours in one place; what models its wire must reach under it."""
    importers = [path for path in SOURCE.rglob("*.py") if "nixl" in {each.split(".")[0] for each in imports_of(path)}]
    assert sorted(importers) == [SOURCE / "emulator" / "nixl_agent.py", SOURCE / "transport" / "nixl.py"]


def test_no_duration_is_taken_from_the_wall_clock():
    """It jumps when it is set; leases, deadlines and heartbeats must not. It only names folders and dates reports."""
    naming = {
        *(SOURCE / "launch" / "cluster.py", SOURCE / "cli" / "bench.py", SOURCE / "compare" / "store.py"),
        *(SOURCE / "keys" / "files.py", SOURCE / "router" / "call.py"),  # when keys were made, when a request came
        *(SOURCE / "emulator" / "clock.py", SOURCE / "drills" / "cluster.py"),  # these make it jump
    }
    readers = {
        path
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in WALL_CLOCKS
    }
    assert readers == naming


def runs_what_it_reads(path: Path) -> Iterator[str]:
    """Places in the file that do."""
    modules, attributes, calls = RUN_WHAT_THEY_READ.values()
    for each in imports_of(path):
        if each.split(".")[0] in modules:
            yield f"{path}: {each}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name) and ("", node.id) in calls:
            yield f"{path}:{node.lineno}: {node.id}"
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else "?"
            if node.attr in attributes or (owner, node.attr) in calls:
                yield f"{path}:{node.lineno}: {owner}.{node.attr}"


def test_nothing_is_unpickled():
    """Nor read by anything else that runs what it reads, whether it came over the network or not."""
    assert not [place for path in SOURCE.rglob("*.py") for place in runs_what_it_reads(path)]


@pytest.mark.parametrize(
    "code",
    [
        *(
            "import pickle",
            "from cloudpickle import loads",
            "import yaml",
            "x = torch.load(f)",
            "np.load(f)",
            "eval(x)",
        ),
        *("socket.recv_pyobj()", "import marshal"),
    ],
)
def test_what_runs_what_it_reads_is_found(tmp_path, code):
    """Each way of it."""
    (tmp_path / "module.py").write_text(code)
    assert list(runs_what_it_reads(tmp_path / "module.py"))


@pytest.mark.parametrize("package", ["", *PACKAGES])
def test_each_package_says_what_it_shows(package):
    """`__all__` is declared, and everything in it is there."""
    module = importlib.import_module(f"kvberth.{package}".rstrip("."))
    assert isinstance(module.__all__, list)
    if package != "vllm_plugin":  # its connector is a class of vLLM's
        assert all(hasattr(module, name) for name in module.__all__)


def test_packages_come_without_engine():
    """Importing ours loads neither torch nor vLLM nor NIXL: router and command run without them."""
    packages = ", ".join(f"kvberth.{each}" for each in PACKAGES)
    code = f"import sys, {packages}; print(*{{'torch', 'vllm', 'nixl'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_types_are_shipped():
    """Those who use kvberth get its types."""
    assert (SOURCE / "py.typed").is_file()
