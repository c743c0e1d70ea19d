"""Probes of the libraries: vLLM, torch, NIXL, and whether vLLM will find kvberth.

Versions come from metadata; whether a library loads is tried in a process of its own. Each probe takes both as
arguments, so that a test can describe an environment that it does not have.
"""

import os
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from kvberth.cli.doctor.check import Check, fail, ok, warn
from kvberth.cli.doctor.isolated import RunCode, run_isolated
from kvberth.cli.packages import VersionOf, installed_version, installed_vllm

__all__ = [
    "probe_nixl",
    "probe_nixl_agent",
    "probe_plugin",
    "probe_torch",
    "probe_torch_companions",
    "probe_vllm",
    "probe_vllm_loads",
]

_SUPPORTED_VLLM = ("0.32.", "0.33.")
_PLUGIN_GROUP = "vllm.general_plugins"
_PLUGIN = "kvberth.vllm_plugin:register"
_COMPANIONS = ("torchvision", "torchaudio")
_INSTALL = (
    "pip install 'kvberth[cpu]' without a GPU, or vllm and 'kvberth[vllm]' with one; "
    "a machine with the router alone does not need it"
)


def probe_vllm(version_of: VersionOf = installed_version) -> Check:
    """A version whose connector interface kvberth knows."""
    found = installed_vllm(version_of)
    if found is None:
        return fail("vLLM", "not installed", _INSTALL)
    distribution, version = found
    if not version.startswith(_SUPPORTED_VLLM):
        return fail("vLLM", f"{distribution} {version}", "kvberth supports vLLM 0.32 and 0.33; install one of those")
    return ok("vLLM", f"{distribution} {version}")


def probe_vllm_loads(version_of: VersionOf = installed_version, run: RunCode = run_isolated) -> Check:
    """Whether the interface that kvberth's connector builds on can be imported, with all that it drags in."""
    if installed_vllm(version_of) is None:
        return fail("vLLM loads", "not installed", _INSTALL)
    outcome = run("import vllm.distributed.kv_transfer.kv_connector.v1.base")
    if not outcome.worked:
        return fail("vLLM loads", outcome.problem, "see the other rows; if they are ok, reinstall vLLM")
    return ok("vLLM loads", "its connector interface can be imported")


def probe_torch(version_of: VersionOf = installed_version, run: RunCode = run_isolated) -> Check:
    """Torch itself."""
    version = version_of("torch")
    if version is None:
        return fail("torch", "not installed", f"it comes with vLLM: {_INSTALL}")
    outcome = run("import torch")
    if not outcome.worked:
        return fail("torch", f"{version}: {outcome.problem}", "reinstall the version of torch that your vLLM asks for")
    return ok("torch", version)


def probe_torch_companions(version_of: VersionOf = installed_version, run: RunCode = run_isolated) -> Check:
    """torchvision and torchaudio, where they are: built for another torch, they fail when vLLM imports them."""
    name = "torch's companions"
    present = {each: version for each in _COMPANIONS if (version := version_of(each)) is not None}
    if not present:
        return ok(name, "neither torchvision nor torchaudio is installed; neither is needed")
    for each, version in present.items():
        outcome = run(f"import torch, {each}")
        if not outcome.worked:
            advice = f"pip uninstall {each}, or install the build for torch {version_of('torch')}"
            return fail(name, f"{each} {version}: {outcome.problem}", advice)
    return ok(name, ", ".join(f"{each} {version}" for each, version in present.items()))


def probe_nixl(version_of: VersionOf = installed_version, run: RunCode = run_isolated) -> Check:
    """The library that moves the bytes."""
    version = version_of("nixl")
    if version is None:
        return fail("NIXL", "not installed", _INSTALL)
    outcome = run("import kvberth.transport.nixl")
    if not outcome.worked:
        advice = f"reinstall it together with the package nixl-cu12 or nixl-cu13 of version {version}"
        return fail("NIXL", f"{version}: {outcome.problem}", advice)
    return ok("NIXL", version)


def probe_nixl_agent(version_of: VersionOf = installed_version, run: RunCode = run_isolated) -> Check:
    """An agent on UCX, made as engines make it; the problem names the back ends that NIXL has if UCX is not one."""
    if version_of("nixl") is None:
        return fail("NIXL's UCX", "not installed", _INSTALL)
    outcome = run(
        "from kvberth.transport.nixl import MemoryType, NixlTransport; NixlTransport('doctor', MemoryType.HOST)"
    )
    if not outcome.worked:
        return fail("NIXL's UCX", outcome.problem, "unset NIXL_PLUGIN_DIR and UCX_* variables, or reinstall NIXL")
    return ok("NIXL's UCX", "the plugin is there, and an agent can be made")


def probe_plugin(plugins: Iterable[EntryPoint] | None = None, allowed: str | None = None) -> Check:
    """Whether vLLM knows the connector by its name: the entry point, and VLLM_PLUGINS, which may leave it out."""
    name = "vLLM plugin"
    known = entry_points(group=_PLUGIN_GROUP) if plugins is None else plugins
    listed = os.environ.get("VLLM_PLUGINS") if allowed is None else allowed
    if not any(each.name == "kvberth" and each.value == _PLUGIN for each in known):
        advice = "reinstall kvberth: a copy of its source on the path is not enough"
        return fail(name, f"no entry point kvberth in {_PLUGIN_GROUP}", advice)
    if listed is not None and "kvberth" not in listed.split(","):
        advice = "add kvberth to it, or kv_connector_module_path to --kv-transfer-config"
        return warn(name, f"VLLM_PLUGINS={listed} leaves kvberth out", advice)
    return ok(name, f"kvberth is registered in {_PLUGIN_GROUP}")
