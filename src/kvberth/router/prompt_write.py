"""Writes that do not wait for the event loop.

uvloop sends what is written at the end of its turn, behind everything else that was ready in it: with hundreds of
streams, half a millisecond later.
"""

import asyncio
import os
from collections.abc import Callable

__all__ = ["prompt_write"]


def prompt_write(transport: asyncio.WriteTransport) -> Callable[[bytes], None]:
    """The transport's `write`, but at once where the socket takes it. TLS is left alone: its bytes are not ours."""
    if transport.get_extra_info("sslcontext") is not None:
        return transport.write
    descriptor = transport.get_extra_info("socket").fileno()

    def write(data: bytes) -> None:
        if transport.is_closing():  # its descriptor is given away, perhaps to another connection
            return
        if not transport.get_write_buffer_size():
            try:
                sent = os.write(descriptor, data)
            except OSError:  # full, or broken, which the transport will find out
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
        transport.write(data)

    return write
