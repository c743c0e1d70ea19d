"""When a forward pass has written its KV: on an accelerator the host launches it and goes on."""

from typing import cast

import torch
from vllm.platforms import current_platform

from kvberth.mover import Fence

__all__ = ["make_fence"]


def make_fence(device_type: str) -> Fence | None:
    """A fence behind all that has been launched by this thread; None where a forward pass has returned when it is done.

    Args:
        device_type: torch's name of the device that holds the KV cache.
    """
    # A platform whose device is none of torch's says by itself when it is done, as the emulated accelerator does.
    record = getattr(type(current_platform), "record_event", None)
    if record is not None:
        return cast(Fence, record())
    if device_type == "cuda":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream())
        return cast(Fence, event)
    return None
