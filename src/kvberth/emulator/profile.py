"""Profiles: what an emulated engine pretends to be, as a TOML file with the source of every figure.

A profile is found by name among those that come with kvberth, or is a file of the user's own.
"""

from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from kvberth.emulator.errors import EmulatorError

__all__ = ["Engine", "Link", "Model", "Profile", "Timing", "load_profile", "profile_names"]

SLOT_BYTES = 4
"""Bytes that one token has in one head slot of one layer of the emulated cache."""


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model's shape, by the names of its `config.json` where they are plain.

    Attributes:
        layers: attention layers, each with a KV cache.
        kv_heads: of the whole model, over all ranks.
        context_tokens: the longest context.
        kv_bytes_per_element: 2 for bfloat16, 1 for fp8.
        kv_head_slots: what an emulated page has in place of heads; tensor parallelism splits them.
    """

    architecture: str
    model_type: str
    layers: int
    kv_heads: int
    attention_heads: int
    head_size: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context_tokens: int
    kv_bytes_per_element: int
    kv_head_slots: int = 2


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's settings where the user says nothing: tokens per block, tokens and sequences per step, tokens of cache."""

    block_size: int
    batched_tokens: int
    sequences: int
    kv_cache_tokens: int


class Timing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step's time is a sum; see `kvberth.emulator.timing`.

    Attributes:
        step_us: of every step, whatever is in it: weights read, launches, all-reduces. Microseconds.
        sequence_us: for each sequence that decodes.
        context_token_ns: for each token of context that a decoding sequence reads. Nanoseconds.
        prompt_token_us: for each token of a prompt.
        prompt_pair_ps: for each pair of a prompt token and a token before it: attention's quadratic term. Picoseconds.
    """

    step_us: float
    sequence_us: float
    context_token_ns: float
    prompt_token_us: float
    prompt_pair_ps: float


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The wire of one engine in each direction, in Gbit/s of true KV bytes, and its latency in microseconds."""

    bandwidth_gbps: float
    latency_us: float


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One emulated engine.

    Attributes:
        sources: where each figure comes from, by `table.key`, or by `table` for all of a table.
    """

    name: str
    title: str
    model: Model
    engine: Engine
    timing: Timing
    link: Link
    sources: dict[str, str]

    @property
    def true_token_bytes(self) -> int:
        """KV bytes of one token over all layers on the real engine: keys and values of every head."""
        model = self.model
        return 2 * model.layers * model.kv_heads * model.head_size * model.kv_bytes_per_element

    @property
    def emulated_token_bytes(self) -> int:
        """KV bytes of one token over all layers that the emulator stores and transfers, over all ranks."""
        return self.model.layers * self.model.kv_head_slots * SLOT_BYTES

    @property
    def bytes_scale(self) -> float:
        """How many true bytes one emulated byte stands for."""
        return self.true_token_bytes / self.emulated_token_bytes

    def check(self) -> None:
        """Refuse what cannot be emulated.

        Raises:
            EmulatorError: names the figure and what would be right.
        """
        for table_name in ("model", "engine", "timing", "link"):
            table = getattr(self, table_name)
            for key in table.__struct_fields__:
                value = getattr(table, key)
                if isinstance(value, int | float) and (value < 0 or (value == 0 and isinstance(value, int))):
                    raise EmulatorError(f"profile {self.name}: {table_name}.{key} must be above 0, not {value}")
                is_figure = isinstance(value, int | float) and key != "kv_head_slots"
                if is_figure and not {table_name, f"{table_name}.{key}"} & set(self.sources):
                    raise EmulatorError(f"profile {self.name}: {table_name}.{key} has no source; add it to [sources]")
        if self.link.bandwidth_gbps == 0:
            raise EmulatorError(f"profile {self.name}: link.bandwidth_gbps must be above 0")


def profile_names() -> list[str]:
    """The profiles that come with kvberth."""
    folder = resources.files("kvberth.emulator") / "profiles"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def load_profile(name: str | Path) -> Profile:
    """A profile by its name, or by the path of a TOML file.

    Raises:
        EmulatorError: there is none, or it does not hold what a profile must.
    """
    path = Path(name)
    if path.suffix == ".toml":
        try:
            text = path.read_text()
        except OSError as error:
            raise EmulatorError(f"profile {name}: {error.strerror}") from error
    elif str(name) in profile_names():
        text = (resources.files("kvberth.emulator") / "profiles" / f"{name}.toml").read_text()
    else:
        raise EmulatorError(
            f"there is no profile {name}: give one of {', '.join(profile_names())}, or the path of a .toml file"
        )
    return parse_profile(text, str(name))


def parse_profile(text: str, where: str) -> Profile:
    """A profile from its text; `where` is for errors.

    Raises:
        EmulatorError: it does not hold what a profile must.
    """
    try:
        profile: Profile = msgspec.toml.decode(text, type=Profile)
    except msgspec.MsgspecError as error:
        raise EmulatorError(f"profile {where}: {error}") from error
    profile.check()
    return profile


def dump_profile(profile: Profile) -> str:
    """The profile as TOML."""
    document: dict[str, Any] = msgspec.to_builtins(profile)
    lines = [f"{key} = {_toml(document.pop(key))}" for key in ("name", "title")]
    for table, values in document.items():
        lines += ["", f"[{table}]"]
        lines += [f"{_toml(key) if table == 'sources' else key} = {_toml(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _toml(value: str | float) -> str:
    # A JSON string without escapes beyond the common ones is a TOML basic string; numbers are written alike.
    return msgspec.json.encode(value).decode()
