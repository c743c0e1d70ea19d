"""What can stop a measurement as a whole. A request that fails stops nothing: it is a record."""

__all__ = ["BenchError", "RecordError", "TargetError", "TraceError"]


class BenchError(Exception):
    """Base of this package's errors; the text is one line for the user."""


class TargetError(BenchError):
    """The server under test cannot be measured: it is not there, names no model, or fails the warm-up."""


class RecordError(BenchError):
    """A file of records has a row that cannot be read; the text begins with file and line."""


class TraceError(BenchError):
    """A file of recorded traffic cannot be used; the text begins with the file and, if there is one, the line."""
