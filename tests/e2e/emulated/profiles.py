"""Profiles that the tests need beside those that are shipped."""

import re
from importlib import resources
from pathlib import Path


def slow_profile(folder: Path, prompt_token_us: float = 200.0) -> str:
    """The path of a profile called `slow`: the small one with slower prefills, by default 512 tokens in 0.1 s."""
    text = resources.files("kvberth.emulator").joinpath("profiles", "small.toml").read_text()
    slow, changes = re.subn(r"^prompt_token_us = .*$", f"prompt_token_us = {prompt_token_us}", text, flags=re.MULTILINE)
    assert changes == 1
    path = folder / "slow.toml"
    path.write_text(slow.replace('name = "small"', 'name = "slow"'))
    return str(path)
