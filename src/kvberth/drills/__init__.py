"""Drills: a local cluster is broken on purpose, under load, and every request is accounted for.

What is sent (`traffic`), what must come back (`judge`, `health`, `states`), what goes wrong (`catalogue`) and what the
network does (`wire`, `zmtp`) are pure; `cluster`, `faults` and the helper processes do the deeds, and `runner` ties
them together.
"""

from kvberth.drills.catalogue import DRILLS, QUICK, Drill, find
from kvberth.drills.results import DrillRow, Report, report_of, table_of
from kvberth.drills.rounds import run_drills
from kvberth.drills.soak import SoakReport, soak

__all__ = [
    "DRILLS",
    "QUICK",
    "Drill",
    "DrillRow",
    "Report",
    "SoakReport",
    "find",
    "report_of",
    "run_drills",
    "soak",
    "table_of",
]
