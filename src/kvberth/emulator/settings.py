"""The emulator's settings, from vLLM's `--additional-config '{"kvberth_emulator": {...}}'`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvberth.emulator.errors import EmulatorError

__all__ = ["EmulatorSettings"]

_KEY = "kvberth_emulator"
_OURS = {"faults", "counters"}
"""Set by programs, not by users."""


class EmulatorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user may change.

    Attributes:
        link: completions of transfers take as long as the true bytes would on the profile's link.
        nixl_progress_delay_us: how long NIXL's progress thread rests between two rounds, in microseconds. NIXL's own
            value is 0, with which every agent burns a core, idle or not; 0 leaves it so.
        faults: the file of `faults.py`, for drills; without one NIXL has no faults but its own.
        counters: the file of `counters.py`; set by the engine for its ranks.
    """

    link: bool = False
    nixl_progress_delay_us: int = 1000
    faults: str = ""
    counters: str = ""

    @classmethod
    def of(cls, additional_config: Any) -> "EmulatorSettings":
        """From vLLM's `additional_config`.

        Raises:
            EmulatorError: an unknown name, or a value that is not possible.
        """
        table = additional_config.get(_KEY, {}) if isinstance(additional_config, Mapping) else {}
        try:
            settings = msgspec.convert(table, cls)
        except msgspec.ValidationError as error:
            known = ", ".join(name for name in cls.__struct_fields__ if name not in _OURS)
            raise EmulatorError(f"additional-config {_KEY}: {error}; the settings are {known}") from error
        if settings.nixl_progress_delay_us < 0:
            raise EmulatorError(f"additional-config {_KEY}: nixl_progress_delay_us must be 0 or more")
        return settings

    def counting(self, path: Path) -> "EmulatorSettings":
        """The same, with this file of counters."""
        return msgspec.structs.replace(self, counters=str(path))

    def store(self, additional_config: Any) -> None:
        """Write these settings back, for the engine's other processes."""
        additional_config[_KEY] = msgspec.to_builtins(self)
