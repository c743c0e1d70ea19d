"""Where KV blocks lie in memory and which bytes go where: pure arithmetic, no I/O."""

from kvberth.layout.compatibility import Fingerprint, Mismatch, find_mismatch
from kvberth.layout.pages import Tokens, TokenSpace, plan_tokens
from kvberth.layout.regions import Region, merge_adjacent
from kvberth.layout.runs import LayoutError, Runs, plan_runs
from kvberth.layout.tokens import block_range, num_blocks_for, units_of

__all__ = [
    "Fingerprint",
    "LayoutError",
    "Mismatch",
    "Region",
    "Runs",
    "TokenSpace",
    "Tokens",
    "block_range",
    "find_mismatch",
    "merge_adjacent",
    "num_blocks_for",
    "plan_runs",
    "plan_tokens",
    "units_of",
]
