"""Profiles that the tests need beside those that are shipped."""

import re
from importlib import resources
from pathlib import Path


def slow_profile(folder: Path) -> str:
    """The path of a profile called `slow`: the small one, but a prompt of 512 tokens takes a tenth of a second."""
    text = resources.files("kvberth.emulator").joinpath("profiles", "small.toml").read_text()
    slow, changes = re.subn(r"^prompt_token_us = .*$", "prompt_token_us = 200.0", text, flags=re.MULTILINE)
    assert changes == 1
    path = folder / "slow.toml"
    path.write_text(slow.replace('name = "small"', 'name = "slow"'))
    return str(path)
