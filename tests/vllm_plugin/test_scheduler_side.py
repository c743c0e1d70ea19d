"""The scheduler's half, with requests that have what vLLM's have."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.request import RequestStatus

from kvberth.mover import (
    AbortRequest,
    AdvancePrefill,
    AnnouncePrefill,
    AwaitRequest,
    DeclineRequest,
    EndPrefill,
    FinishPrefill,
    RestartPrefill,
    SchedulePrefill,
)
from kvberth.protocol import Reason, TransferKey, TransferMode
from kvberth.protocol.events import PrefillAdvanced, PrefillFinished, PrefillRestarted
from kvberth.vllm_plugin.meta import TransferOutcome, WorkerMeta
from kvberth.vllm_plugin.scheduler_side import SchedulerSide
from kvberth.vllm_plugin.settings import ConnectorSettings


@dataclass
class FakeRequest:
    """A request of 40 tokens: three blocks of 16."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    prompt_token_ids: list[int] | None = field(default_factory=lambda: list(range(40)))
    status: RequestStatus = RequestStatus.RUNNING
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 40
    lora_request: None = None
    cache_salt: str | None = None
    mm_features: tuple[()] = ()


TO_PREFILL = {"do_remote_decode": True, "transfer_id": "t-1"}
TO_DECODE = {"do_remote_prefill": True, "transfer_id": "t-1", "remote_host": "P", "remote_port": 7000}
KEY = TransferKey("t-1")


def make(role: str, public_key: str = "", **settings: Any) -> SchedulerSide:
    return SchedulerSide(
        ConnectorSettings(**settings),
        block_size=16,
        is_producer=role != "consumer",
        is_consumer=role != "producer",
        engine_id="engine",
        host="127.0.0.1",
        port=7000,
        tp_size=1,
        public_key=public_key,
    )


def finished_prefill(
    side: SchedulerSide,
    params: dict[str, Any] = TO_PREFILL,
    status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED,
) -> tuple[bool, dict[str, Any] | None]:
    request = FakeRequest("p-1", dict(params))
    side.arrived(request)
    request.status = status
    request.num_computed_tokens = 40
    return side.finished(request, [5, 6, 7, 8])


def test_prefill_keeps_its_blocks_and_tells_where_it_is():
    """The response is what a decode worker needs; the fourth block, of the generated token, stays out."""
    side = make("producer")
    keep, params = finished_prefill(side)
    assert keep
    announced, finish = side.take_commands()
    assert isinstance(announced, AnnouncePrefill)
    assert finish == FinishPrefill((KEY,), PrefillFinished((5, 6, 7)))
    assert params["transfer_id"] == "t-1"
    assert params["transfer_mode"] == "push"
    assert (params["remote_host"], params["remote_port"], params["do_remote_prefill"]) == ("127.0.0.1", 7000, True)


@pytest.mark.parametrize("key", ["", "p" * 40])
def test_a_prefill_worker_names_its_key(key):
    """If it has one: without, the response is what it always was."""
    _, params = finished_prefill(make("producer", public_key=key))
    assert params.get("remote_public_key", "") == key


@pytest.mark.parametrize(("own_key", "identity"), [("", ""), ("d" * 40, "p" * 40)])
def test_a_decode_worker_with_a_key_wants_the_prefill_worker_to_have_one(own_key, identity):
    """The one that the request names; one without keys does not care."""
    side = make("consumer", public_key=own_key)
    request = FakeRequest("d-1", {**TO_DECODE, "remote_public_key": "p" * 40})
    side.allocated(request, [1, 2, 3], 40)
    (command,) = side.take_commands()
    assert command.identity == identity


def test_a_prefill_that_ends_with_a_stop_token_is_handed_over_like_any_other():
    """P's single token may be the end of the answer, or a stop string: D will find the same."""
    keep, params = finished_prefill(make("producer"), status=RequestStatus.FINISHED_STOPPED)
    assert keep
    assert params["do_remote_prefill"]


def test_what_prefill_answers_is_what_decode_understands():
    """A sequential router passes it on unchanged."""
    _, params = finished_prefill(make("producer", transfer_mode=TransferMode.PULL))
    side = make("consumer")
    request = FakeRequest("d-1", params)
    assert side.tokens_to_load(request, 16) == 24
    side.allocated(request, [1, 2, 3], 24)
    (command,) = side.take_commands()
    assert isinstance(command, AwaitRequest)
    assert (command.key, command.host, command.port) == (KEY, "127.0.0.1", 7000)
    assert (command.event.mode, command.event.first_token, command.event.blocks) == (TransferMode.PULL, 16, (2, 3))


def test_both_workers_make_the_same_digest():
    """Of the same prompt; of another one they do not."""
    producer, consumer = make("producer"), make("consumer")
    producer.arrived(FakeRequest("p-1", dict(TO_PREFILL)))
    consumer.allocated(FakeRequest("d-1", dict(TO_DECODE)), [1, 2, 3], 40)
    other = make("consumer")
    other.allocated(FakeRequest("d-1", dict(TO_DECODE), prompt_token_ids=[9] * 40), [1, 2, 3], 40)
    (announced,), (waiting,), (stranger,) = producer.take_commands(), consumer.take_commands(), other.take_commands()
    assert announced.event.prompt_digest == waiting.event.prompt_digest != stranger.event.prompt_digest


def test_aborted_prefill_keeps_its_blocks_until_the_mover_lets_go():
    """The answer says nothing, since there is nothing to fetch."""
    side = make("producer")
    request = FakeRequest("p-1", dict(TO_PREFILL))
    side.arrived(request)
    request.status = RequestStatus.FINISHED_ABORTED
    assert side.finished(request, [5]) == (True, None)
    assert isinstance(side.take_commands()[-1], EndPrefill)


def test_leased_blocks_are_told_when_they_change():
    """The gauge shows what finished prefills keep, until the movers have let go."""
    side = make("producer")
    assert side.take_leased_blocks() is None
    finished_prefill(side)
    assert side.take_leased_blocks() == 4
    assert side.take_leased_blocks() is None
    side.ended({"p-1"}, set(), {})
    assert side.take_leased_blocks() == 0


def test_released_transfer_id_can_be_used_again():
    """As long as it is live, a second request with it takes no part."""
    side = make("producer")
    finished_prefill(side)
    second = FakeRequest("p-2", dict(TO_PREFILL))
    side.take_commands()
    side.arrived(second)
    assert side.take_commands() == []
    side.ended({"p-1"}, set(), {})
    side.arrived(FakeRequest("p-3", dict(TO_PREFILL)))
    assert len(side.take_commands()) == 1


def test_local_prefix_of_the_whole_prompt_declines():
    """vLLM gives no external tokens, for a full hit or for prompt logprobs: P is told, nobody waits."""
    side = make("consumer")
    request = FakeRequest("d-1", dict(TO_DECODE))
    side.allocated(request, [1, 2, 3], 0)
    (command,) = side.take_commands()
    assert isinstance(command, DeclineRequest)
    assert command.event.reason is Reason.NOT_NEEDED
    assert side.finished(request, [1, 2, 3]) == (False, None)


def test_abort_while_waiting_is_passed_on():
    """vLLM keeps the blocks; the mover reports the request when they are safe."""
    side = make("consumer")
    request = FakeRequest("d-1", dict(TO_DECODE))
    side.allocated(request, [1, 2, 3], 40)
    side.take_commands()
    assert side.finished(request, [1, 2, 3]) == (False, None)
    assert side.take_commands() == [AbortRequest(KEY)]
    side.ended(set(), {"d-1"}, {"d-1": TransferOutcome(False, "consumer_gone", "")})
    assert side._outcomes == {}, "nobody would ever fetch it"


def test_rejected_before_it_was_given_blocks_frees_the_prefill_worker():
    """The decode worker's front end refuses the request after P has begun."""
    side = make("consumer")
    request = FakeRequest("d-1", dict(TO_DECODE), status=RequestStatus.FINISHED_ABORTED)
    assert side.finished(request, []) == (False, None)
    (command,) = side.take_commands()
    assert isinstance(command, DeclineRequest)
    assert command.event.reason is Reason.CONSUMER_GONE


def test_rejection_told_of_an_aborted_request_changes_nothing():
    """A client leaves while D waits: vLLM aborts the request, and tells of a rejection on top."""
    side = make("consumer")
    request = FakeRequest("d-1", dict(TO_DECODE))
    side.allocated(request, [1, 2, 3], 40)
    side.finished(request, [1, 2, 3])
    side.take_commands()
    side.finished(FakeRequest("d-1-rejected", dict(TO_DECODE), status=RequestStatus.FINISHED_ABORTED), [])
    assert side.take_commands() == []


def test_rejected_parent_gives_up_the_transfers_of_all_its_children():
    """With n = 3, P would hold its blocks for the other two until their lease ends."""
    side = make("consumer")
    rejected = FakeRequest("cmpl-1", {**TO_DECODE, "num_consumers": 3}, status=RequestStatus.FINISHED_ABORTED)
    side.finished(rejected, [])
    assert [command.key for command in side.take_commands()] == [TransferKey("t-1", index) for index in range(3)]
    child = FakeRequest("1_cmpl-1", {**TO_DECODE, "num_consumers": 3}, status=RequestStatus.FINISHED_ABORTED)
    side.finished(child, [])
    assert [command.key for command in side.take_commands()] == [TransferKey("t-1", 1)]


def test_retry_computes_locally():
    """After a failed load, or preemption, the request asks nobody any more."""
    side = make("consumer")
    request = FakeRequest("d-1", dict(TO_DECODE))
    side.allocated(request, [1, 2, 3], 40)
    side.ended(set(), {"d-1"}, {"d-1": TransferOutcome(False, "peer_lost", "silent for 3.0 s")})
    side.take_commands()
    assert side.tokens_to_load(request, 0) == 0
    side.allocated(request, [1, 2, 3], 0)
    assert side.take_commands() == []
    expected = {"transfer": {"ok": False, "reason": "peer_lost", "detail": "silent for 3.0 s", "timeline": None}}
    assert side.finished(request, [1, 2, 3]) == (False, expected)


def test_ranks_that_report_in_different_steps():
    """The first rank's failure is still known when the last rank has reported."""
    side = make("consumer")
    request = FakeRequest("d-1", dict(TO_DECODE))
    side.allocated(request, [1, 2, 3], 40)
    side.ended(set(), set(), {"d-1": TransferOutcome(False, "transport", "link down")})
    side.ended(set(), {"d-1"}, {"d-1": TransferOutcome(True, "none", "")})
    _, params = side.finished(request, [1, 2, 3])
    assert params == {"transfer": {"ok": False, "reason": "transport", "detail": "link down", "timeline": None}}


def test_second_request_of_a_live_transfer_computes_locally():
    """Two prompts of one batch share the parameters; one takes part, the other is served all the same."""
    side = make("consumer")
    side.allocated(FakeRequest("d-1", dict(TO_DECODE)), [1, 2, 3], 40)
    assert side.tokens_to_load(FakeRequest("d-2", dict(TO_DECODE)), 0) == 0


@pytest.mark.parametrize(("role", "params"), [("producer", TO_DECODE), ("consumer", TO_PREFILL)])
def test_wrong_role_is_served_without_a_handoff(role, params):
    """A router that mixes up its engines gets answers, and the log says what is wrong."""
    side = make(role)
    request = FakeRequest("r-1", dict(params))
    side.arrived(request)
    assert side.tokens_to_load(request, 0) == 0
    side.allocated(request, [1, 2, 3], 0)
    assert side.take_commands() == []
    assert side.finished(request, [1, 2, 3]) == (False, None)


@pytest.mark.parametrize("params", [{"do_remote_prefill": True}, {"do_remote_decode": True, "attempt": "x"}])
def test_unusable_parameters_are_served_without_a_handoff(params):
    """And logged, once."""
    side = make("both")
    request = FakeRequest("r-1", dict(params))
    side.arrived(request)
    assert side.tokens_to_load(request, 0) == 0
    assert request.kv_transfer_params is None


def test_requests_without_parameters_are_none_of_our_business():
    """An engine with the connector serves ordinary requests."""
    side = make("both")
    request = FakeRequest("r-1", None)
    side.arrived(request)
    side.allocated(request, [1], 0)
    assert side.finished(request, [1]) == (False, None)
    assert side.take_commands() == []


def test_failure_of_any_rank_is_the_request_s():
    """Two ranks report; one has failed."""
    well = WorkerMeta({"d-1": TransferOutcome(True, "none", "")})
    badly = WorkerMeta({"d-1": TransferOutcome(False, "transport", "link down")})
    assert well.aggregate(badly).outcomes["d-1"].ok is False
    assert badly.aggregate(well).outcomes["d-1"].ok is False


# What a step computes.


def step(
    side: SchedulerSide, *, before: int, count: int, blocks: list[int], is_new: bool = False
) -> list[AdvancePrefill]:
    """A step as vLLM's scheduler describes it, for request p-1."""
    new = [SimpleNamespace(req_id="p-1", num_computed_tokens=before)] if is_new else []
    cached = SimpleNamespace(req_ids=[] if is_new else ["p-1"], num_computed_tokens=[] if is_new else [before])
    output = SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"other": 5, "p-1": count},
        preempted_req_ids=None,
        kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda _: (blocks,)),
    )
    output.scheduled_cached_reqs.req_ids.append("other")
    output.scheduled_cached_reqs.num_computed_tokens.append(0)
    return side.scheduled(output)


def preempt(side: SchedulerSide) -> list[AdvancePrefill]:
    output = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={},
        preempted_req_ids={"p-1", "other"},
    )
    return side.scheduled(output)


def prefilling() -> SchedulerSide:
    side = make("producer")
    side.arrived(FakeRequest("p-1", dict(TO_PREFILL)))
    side.take_commands()
    return side


def advanced(first: int, *blocks: int, is_complete: bool = False) -> list[AdvancePrefill]:
    return [AdvancePrefill((KEY,), PrefillAdvanced(first, blocks, is_complete))]


def test_without_streaming_all_blocks_go_with_the_last_chunk():
    """`stream_during_prefill` = false: nothing before the prompt's end, then everything from block 0."""
    side = make("producer", stream_during_prefill=False)
    side.arrived(FakeRequest("p-1", dict(TO_PREFILL)))
    assert step(side, before=0, count=32, blocks=[5, 6], is_new=True) == []
    assert step(side, before=32, count=8, blocks=[5, 6, 7]) == advanced(0, 5, 6, 7, is_complete=True)


def test_what_a_step_will_have_computed_is_told_when_it_begins():
    """For who wants to know when the prefill will end; the first answer token is none of the prompt's."""
    side = prefilling()
    step(side, before=0, count=20, blocks=[1, 2], is_new=True)
    step(side, before=20, count=21, blocks=[1, 2, 3])
    assert side.take_commands() == [SchedulePrefill((KEY,), 20), SchedulePrefill((KEY,), 40)]


def test_whole_blocks_of_each_chunk_are_told():
    """Once each; the partial one only with the chunk that completes the prompt."""
    side = prefilling()
    assert step(side, before=0, count=20, blocks=[5, 6], is_new=True) == advanced(0, 5)
    assert step(side, before=20, count=5, blocks=[5, 6]) == []
    assert step(side, before=25, count=14, blocks=[5, 6, 7]) == advanced(1, 6)
    assert step(side, before=39, count=1, blocks=[5, 6, 7]) == advanced(2, 7, is_complete=True)
    assert step(side, before=40, count=1, blocks=[5, 6, 7]) == []


def test_cached_blocks_come_with_the_first_chunk():
    """They may be computed by another request in that very step."""
    side = prefilling()
    assert step(side, before=32, count=8, blocks=[5, 6, 7], is_new=True) == advanced(0, 5, 6, 7, is_complete=True)


def test_blocks_of_the_answer_are_none_of_the_prompt():
    """The table may be longer than the prompt."""
    side = prefilling()
    assert step(side, before=0, count=40, blocks=[5, 6, 7, 8], is_new=True) == advanced(0, 5, 6, 7, is_complete=True)


def test_preemption_begins_anew():
    """The movers hear it with the step in which the blocks are gone, and later of other blocks."""
    side = prefilling()
    step(side, before=0, count=32, blocks=[5, 6], is_new=True)
    assert preempt(side) == []
    assert side.take_commands() == [SchedulePrefill((KEY,), 32), RestartPrefill((KEY,), PrefillRestarted())]
    assert step(side, before=0, count=40, blocks=[9, 8, 7]) == advanced(0, 9, 8, 7, is_complete=True)


def test_a_finished_prefill_is_told_of_no_more():
    """Its blocks are the movers' until they let go."""
    side = make("producer")
    finished_prefill(side)
    assert preempt(side) == []
    assert [type(each) for each in side.take_commands()] == [AnnouncePrefill, FinishPrefill]
