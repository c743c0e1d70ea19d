"""Recorded traffic from files in the schemas in which it is published.

One module per family of formats turns a file into rows; `read` tells them apart and decides what a bad row means.
What is not recorded, the tokens of most prompts, is drawn later, by `kvberth.bench.trace_traffic`.
"""

from kvberth.bench.traces.read import FORMATS, read_trace
from kvberth.bench.traces.rows import (
    BLOCK_TOKENS,
    BadRow,
    GivenTokens,
    HashedBlocks,
    RandomTokens,
    Trace,
    TraceRow,
    Turn,
)

__all__ = [
    "BLOCK_TOKENS",
    "FORMATS",
    "BadRow",
    "GivenTokens",
    "HashedBlocks",
    "RandomTokens",
    "Trace",
    "TraceRow",
    "Turn",
    "read_trace",
]
