"""Ways to hand a KV cache over, side by side on the same traffic: measured, summed up, and put into words.

`session` measures into a folder; `comparison` makes figures of what is there; `report` shows them. The modules between
are pure.
"""

from kvberth.compare.comparison import Comparison, load, to_json
from kvberth.compare.errors import CompareError, FolderError
from kvberth.compare.modes import Mode
from kvberth.compare.session import Progress, begin, compare
from kvberth.compare.settings import CompareSettings, published, quick
from kvberth.compare.store import Folder
from kvberth.compare.texts import plan_table, say_plan, to_csv, to_markdown, to_tables
from kvberth.compare.traffic import check_traffic, choose_trace

__all__ = [
    "CompareError",
    "CompareSettings",
    "Comparison",
    "Folder",
    "FolderError",
    "Mode",
    "Progress",
    "begin",
    "check_traffic",
    "choose_trace",
    "compare",
    "load",
    "plan_table",
    "published",
    "quick",
    "say_plan",
    "to_csv",
    "to_json",
    "to_markdown",
    "to_tables",
]
