"""The report: one HTML file that needs nothing else."""

from kvberth.compare.report.html import to_html

__all__ = ["to_html"]
