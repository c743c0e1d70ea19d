"""`kvberth doctor`: whether this machine can run engines and router, and what to do where it cannot."""

from kvberth.cli.doctor.check import Check, Status
from kvberth.cli.doctor.command import doctor

__all__ = ["Check", "Status", "doctor"]
