"""kvberth: prefill and decode apart on stock vLLM, with the KV cache handed over in the background."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("kvberth")
