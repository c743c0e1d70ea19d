"""Drills: a local cluster is broken on purpose, under load, and every request is accounted for.

What is sent (`traffic`), what must come back (`judge`, `health`, `states`), what goes wrong (`catalogue`) and what the
network does (`wire`, `zmtp`) are pure; `cluster`, `faults` and the helper processes do the deeds, and `runner` ties
them together.
"""

from kvberth.drills.catalogue import CORE, DRILLS, QUICK, Drill, find
from kvberth.drills.plan import Turn, plan_lines, plan_turns
from kvberth.drills.results import DrillRow, Report, report_of, table_of
from kvberth.drills.rounds import run_drills
from kvberth.drills.soak import soak
from kvberth.drills.soak_report import SoakReport, soak_page

__all__ = [
    "CORE",
    "DRILLS",
    "QUICK",
    "Drill",
    "DrillRow",
    "Report",
    "SoakReport",
    "Turn",
    "find",
    "plan_lines",
    "plan_turns",
    "report_of",
    "run_drills",
    "soak",
    "soak_page",
    "table_of",
]
