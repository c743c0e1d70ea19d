"""The emulated accelerator: a vLLM platform on which the arithmetic is a wait, and the KV cache holds a canary.

The real scheduler, block tables, API server, connectors and transfer library run. `KVBERTH_EMULATE=1` switches it on;
`--model` then names a profile. See `docs/emulator.md`. Nothing of vLLM is imported before it is switched on.
"""

import os

from kvberth.emulator.errors import EmulatorError
from kvberth.emulator.model_files import model_folder
from kvberth.emulator.profile import Profile, load_profile, profile_names

__all__ = ["SWITCH", "EmulatorError", "Profile", "is_on", "load_profile", "model_folder", "platform", "profile_names"]

SWITCH = "KVBERTH_EMULATE"
"""The environment variable; the platform must be known before vLLM reads its arguments."""


def is_on() -> bool:
    """Whether engines of this process are emulated."""
    return os.environ.get(SWITCH, "").lower() in {"1", "true", "yes", "on"}


def platform() -> str | None:
    """Entry point `vllm.platform_plugins`: the platform's class, or None to leave vLLM alone."""
    return "kvberth.emulator.platform.EmulatedPlatform" if is_on() else None
