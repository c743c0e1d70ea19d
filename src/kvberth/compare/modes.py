"""The ways to serve a prompt that are compared, and the cluster each one needs. Starts nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvberth.launch import ClusterSettings, Connector

__all__ = ["EMULATED_ONLY", "Mode", "cluster_settings", "explain", "is_divided", "say"]


class Mode(StrEnum):
    """Each with the same number of engines, but for `decode-only`."""

    PUSH = "push"
    """kvberth's: the prefill worker WRITEs behind each chunk."""
    PUSH_WHOLE = "push-whole"
    """kvberth's: it WRITEs all at the end of the prefill. What streaming gains is the difference."""
    PULL = "pull"
    """kvberth's: the decode worker READs after the prefill."""
    VLLM_PULL = "vllm-pull"
    """vLLM's NixlConnector; NIXL posts with four threads, vLLM's default."""
    VLLM_PULL_INLINE = "vllm-pull-inline"
    """`vllm-pull` with `num_threads` 0: NIXL posts in the thread that asks for it, the engine's own."""
    VLLM_PUSH = "vllm-push"
    """vLLM's NixlPushConnector, with four threads again."""
    VLLM_PUSH_INLINE = "vllm-push-inline"
    COLOCATED = "colocated"
    """Two engines that do both, behind the same router: the same hardware, undivided."""
    DECODE_ONLY = "decode-only"
    """One engine that has all but the end of each prompt in its cache: the decode load alone, as a reference."""


@dataclass(frozen=True, slots=True)
class _Way:
    """How a mode's cluster differs from the common one."""

    connector: Connector = Connector.KVBERTH
    transfer_mode: str = "push"
    connector_config: Mapping[str, Any] = field(default_factory=dict)
    prefill: int = 1
    decode: int = 1


_INLINE = {"num_threads": 0}
_WAYS = {
    Mode.PUSH: _Way(),
    Mode.PUSH_WHOLE: _Way(connector_config={"stream_during_prefill": False}),
    Mode.PULL: _Way(transfer_mode="pull"),
    Mode.VLLM_PULL: _Way(Connector.VLLM, "pull"),
    Mode.VLLM_PUSH: _Way(Connector.VLLM, "push"),
    Mode.VLLM_PULL_INLINE: _Way(Connector.VLLM, "pull", _INLINE),
    Mode.VLLM_PUSH_INLINE: _Way(Connector.VLLM, "push", _INLINE),
    # Without prefill workers the router sends whole requests to the "decode workers", whose connector then has
    # nothing to do: clients, router and engines are those of the other modes.
    Mode.COLOCATED: _Way(prefill=0, decode=2),
    Mode.DECODE_ONLY: _Way(prefill=0, decode=1),
}

EMULATED_ONLY = frozenset(mode for mode, way in _WAYS.items() if way.connector is Connector.VLLM)
"""The router finds engines with vLLM's own connectors only where they are emulated."""

_WORDS = {
    "push": "kvberth push",
    "push-whole": "kvberth push in one piece",
    "pull": "kvberth pull",
    "vllm-pull": "vLLM pull",
    "vllm-pull-inline": "vLLM pull (inline posting)",
    "vllm-push": "vLLM push",
    "vllm-push-inline": "vLLM push (inline posting)",
    "colocated": "two undivided engines",
    "decode-only": "decode load alone",
}
_EXPLAINED = {
    "push": "the prefill worker WRITEs behind each chunk of the prompt",
    "push-whole": "the prefill worker WRITEs once, at the prompt's end",
    "pull": "the decode worker READs after the prefill, in the background",
    "vllm-pull": "vLLM's NixlConnector, NIXL posting with four threads, vLLM's default",
    "vllm-pull-inline": "the same, NIXL posting in the decode worker's own loop (num_threads 0)",
    "vllm-push": "vLLM's NixlPushConnector, NIXL posting with four threads, vLLM's default",
    "vllm-push-inline": "the same, NIXL posting in the connector's writer thread (num_threads 0)",
    "colocated": "each reads prompts and writes answers: the same hardware, not divided, behind the same router",
}


def say(mode: str) -> str:
    """A mode's name for people; one that is not ours, of an attached deployment, is its own."""
    return _WORDS.get(mode, mode)


def explain(mode: str) -> str:
    """What the mode is, for people; empty for an attached deployment with a name of its own."""
    return _EXPLAINED.get(mode, "")


def is_divided(mode: str) -> bool:
    """Whether prompts are read and answered by different engines."""
    return mode not in (Mode.COLOCATED, Mode.DECODE_ONLY)


def cluster_settings(
    mode: Mode,
    *,
    model: str,
    emulate: bool,
    emulate_link: bool = False,
    prefix_caching: bool = False,
    engine_args: tuple[str, ...] = (),
) -> ClusterSettings:
    """The cluster of `mode`: what is not named in the mode's own words is the same for all.

    Raises:
        ValueError: one line that names the setting and what would be right.
    """
    way = _WAYS[mode]
    return ClusterSettings(
        model=model,
        emulate=emulate,
        emulate_link=emulate_link,
        prefill=way.prefill,
        decode=way.decode,
        mode=way.transfer_mode,
        connector=way.connector,
        connector_config=way.connector_config,
        prefix_caching=prefix_caching or mode is Mode.DECODE_ONLY,
        engine_args=engine_args,
    )
