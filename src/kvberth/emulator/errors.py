"""What can go wrong with the emulated accelerator before it runs."""

__all__ = ["EmulatorError"]


class EmulatorError(ValueError):
    """A profile, a setting or a request that cannot be emulated; the text says what would be right."""
