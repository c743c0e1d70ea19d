"""What can stop a comparison as a whole. A cell that could not be measured stops nothing: the report says so."""

__all__ = ["CompareError", "FolderError"]


class CompareError(Exception):
    """Base of this package's errors; the text is one line for the user."""


class FolderError(CompareError):
    """The folder of results cannot be used: not there, not ours, of another comparison, or not writable."""
