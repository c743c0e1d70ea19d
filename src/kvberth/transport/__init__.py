"""One-sided transfers behind a seam: `Transport` is what the mover uses, `memory` is its twin for tests.

`kvberth.transport.nixl` is not imported here: it needs the NIXL library, which the router's install does not have.
"""

from kvberth.transport.base import Direction, Handle, Transport, TransportError
from kvberth.transport.memory import MemoryFabric, MemoryTransport

__all__ = ["Direction", "Handle", "MemoryFabric", "MemoryTransport", "Transport", "TransportError"]
