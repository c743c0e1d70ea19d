"""Calibration: the timing of a profile, fitted to measured runs of a real engine. No clock and no engine.

`measured` reads runs and tells what the engine was doing, `fits` has the formulas, `least_squares` the arithmetic, and
`result` makes a profile of it.
"""

from kvberth.emulator.calibrate.measured import MeasuredRequest, MeasuredRun, read_run
from kvberth.emulator.calibrate.result import Calibration, Figure, calibrate

__all__ = ["Calibration", "Figure", "MeasuredRequest", "MeasuredRun", "calibrate", "read_run"]
