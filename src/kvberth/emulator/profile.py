"""Profiles: what an emulated engine pretends to be, as a TOML file with the source of every figure.

A profile is found by name among those that come with kvberth, or is a file of the user's own.
"""

import math
import re
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from kvberth.emulator.errors import EmulatorError

__all__ = ["Engine", "Link", "Model", "Profile", "Timing", "load_profile", "profile_names"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

HEAD_SLOTS = 2
"""What an emulated page has in place of heads, over all ranks; tensor parallelism splits them."""
SLOT_BYTES = 4
"""Bytes that one token has in one head slot of one layer of the emulated cache."""


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model's shape, by the names of its `config.json` where they are plain.

    Attributes:
        layers: attention layers, each with a KV cache.
        kv_heads: of the whole model, over all ranks.
        context_tokens: the longest context.
        kv_bytes_per_element: 2 for bfloat16, 1 for fp8.
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
        return self.model.layers * HEAD_SLOTS * SLOT_BYTES

    @property
    def bytes_scale(self) -> float:
        """How many true bytes one emulated byte stands for."""
        return self.true_token_bytes / self.emulated_token_bytes

    def check(self) -> None:
        """Refuse what cannot be emulated.

        Raises:
            EmulatorError: names the figure and what would be right.
        """
        if not _NAME.fullmatch(self.name):
            raise EmulatorError(
                f"profile {self.name!r}: the name begins with a letter or a digit, and has letters, digits, '.', '_' "
                "and '-'"
            )
        for table_name in ("model", "engine", "timing", "link"):
            table = getattr(self, table_name)
            for key in table.__struct_fields__:
                value = getattr(table, key)
                if isinstance(value, str):
                    continue
                where = f"{table_name}.{key}"
                may_be_zero = table_name == "timing" or where == "link.latency_us"
                if not (math.isfinite(value) and (value > 0 or (value == 0 and may_be_zero))):
                    least = "0 or more" if may_be_zero else "above 0"
                    raise EmulatorError(f"profile {self.name}: {where} must be {least}, not {value}")
                if not {table_name, where} & set(self.sources):
                    raise EmulatorError(f"profile {self.name}: {where} has no source; add it to [sources]")


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
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise EmulatorError(f"profile {name}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise EmulatorError(f"profile {name}: is not TOML: {error}") from error
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
    # A JSON string is a TOML basic string, but for one character; numbers are written alike.
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
