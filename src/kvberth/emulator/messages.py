"""From vLLM's scheduler message to the plan of a step. What may change between vLLM's versions is read here."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvberth.emulator.contexts import Arrival, Continuation, StepPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["plan_of"]


def plan_of(scheduler_output: "SchedulerOutput") -> StepPlan:
    """Copy what the step needs: the scheduler goes on while the step waits for its turn."""
    scheduled = scheduler_output.num_scheduled_tokens
    arrivals = tuple(
        Arrival(
            request_id=new.req_id,
            tokens=np.array(new.prompt_token_ids, dtype=np.uint32),
            blocks=_blocks(new.block_ids),
            computed=new.num_computed_tokens,
            count=scheduled[new.req_id],
        )
        for new in scheduler_output.scheduled_new_reqs
    )
    cached = scheduler_output.scheduled_cached_reqs
    continuations = tuple(
        Continuation(
            request_id=request_id,
            new_blocks=None if blocks is None else _blocks(blocks),
            resumed=request_id in cached.resumed_req_ids,
            computed=computed,
            count=scheduled[request_id],
            outputs=outputs,
            all_tokens=_tokens(cached.all_token_ids.get(request_id)),
        )
        for request_id, blocks, computed, outputs in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        )
    )
    return StepPlan(
        finished=tuple(scheduler_output.finished_req_ids),
        preempted=tuple(scheduler_output.preempted_req_ids or ()),
        arrivals=arrivals,
        continuations=continuations,
    )


def _blocks(groups: "Sequence[Sequence[int]]") -> NDArray[np.int64]:
    """The one group's block ids; the emulator has no other groups."""
    (blocks,) = groups
    return np.array(blocks, dtype=np.int64)


def _tokens(tokens: "Sequence[int] | None") -> NDArray[np.uint32] | None:
    return None if tokens is None else np.array(tokens, dtype=np.uint32)
