"""One request's life as a machine: events in, actions out."""

import json
from dataclasses import replace
from itertools import product

import pytest

from kvberth.router.actions import (
    AbortDecode,
    AbortPrefill,
    Deliver,
    Refuse,
    Retry,
    StartDecode,
    StartPrefill,
)
from kvberth.router.answer import Whole
from kvberth.router.binding import Binding
from kvberth.router.choice import BindingChoice, Choice
from kvberth.router.config import Mode
from kvberth.router.engines import Engine, EngineInfo, Role
from kvberth.router.errors import Failure, FailureKind
from kvberth.router.events import (
    BindNow,
    DecodeAnswered,
    DecodeBehind,
    DecodeFailed,
    HandedOver,
    PrefillAnswered,
    PrefillFailed,
    PrefillRejected,
)
from kvberth.router.life import _HANDLERS, Life, State
from kvberth.router.transfer import decode_params, prefill_params

P1, P2 = (Engine(f"http://p{i}", Role.PREFILL, EngineInfo(Role.PREFILL, f"p{i}", "h", 5, 1)) for i in (1, 2))
D1, D2, D3 = (Engine(f"http://d{i}", Role.DECODE, EngineInfo(Role.DECODE, f"d{i}", "", 0, 1)) for i in (1, 2, 3))
ANSWER = Whole(200, (), b"answer")
REJECTION = Whole(400, (), b"too long")
P_GONE = Failure("prefill", FailureKind.UNREACHABLE, "gone")
P_500 = Failure("prefill", FailureKind.SERVER_ERROR, "500")
P_LATE = Failure("prefill", FailureKind.FIRST_TOKEN_TIMEOUT, "late")
D_GONE = Failure("decode", FailureKind.UNREACHABLE, "gone")
D_SLOW_CONNECT = Failure("decode", FailureKind.CONNECT_TIMEOUT, "slow")
D_LATE = Failure("decode", FailureKind.FIRST_TOKEN_TIMEOUT, "late")


class Stock:
    """Engines in the order in which they are to be chosen."""

    def __init__(self, prefill, decode, roomy=None, bound=Binding.EARLY, lacking_little=()):
        self.prefill, self.decode, self.lacking_little = prefill, decode, lacking_little
        self.roomy = decode if roomy is None else roomy
        self.binding = BindingChoice(bound, "why not")

    def choose_prefill(self, excluded=()):
        return next((Choice(each, "next") for each in self.prefill if each not in excluded), None)

    def choose_decode(self, excluded=()):
        return next((Choice(each, "next") for each in self.decode if each not in excluded), None)

    def choose_decode_with_room(self, excluded=()):
        return next((Choice(each, "next") for each in self.roomy if each not in excluded), None)

    def choose_binding(self, prefill):
        assert prefill in self.prefill
        return self.binding

    def lacks_little(self, decode):
        return decode in self.lacking_little


def life(mode=Mode.PUSH, prefill=(P1, P2), decode=(D1, D2), obstacle=None, consumers=1, binding=Binding.EARLY, **stock):
    numbers = iter(range(100))
    return Life(
        Stock(prefill, decode, **stock),
        mode=mode,
        binding=binding,
        obstacle=obstacle,
        num_consumers=consumers,
        new_transfer_id=lambda: f"t{next(numbers)}",
    )


def start_p(engine, transfer, mode=Mode.PUSH, consumers=1):
    return StartPrefill(engine, transfer, prefill_params(transfer, num_consumers=consumers, mode=mode), "next")


def start_d(engine, transfer, producer, consumers=1, attempt=0, mode=Mode.PUSH):
    params = decode_params(transfer, num_consumers=consumers, mode=mode, producer=producer.info, attempt=attempt)
    return StartDecode(engine, params, "next", attempt)


def alone(engine):
    return StartDecode(engine, None, "next")


def pulls(engine, params, attempt=0):
    return StartDecode(engine, params, "next", attempt)


def refusal(actions):
    (action,) = [action for action in actions if isinstance(action, Refuse)]
    return action.error.status, action.error.code


def test_push_starts_both_legs_at_once():
    """D registers while P computes; both legs carry the same transfer."""
    one = life(consumers=3)
    assert one.begin() == [start_p(P1, "t0", consumers=3), start_d(D1, "t0", P1, consumers=3)]
    assert (one.path, one.awaited_leg) == ("push", "prefill")


def test_push_delivers_what_decode_answers():
    """P's answer starts nothing; D's is delivered."""
    one = life()
    one.begin()
    assert one.handle(PrefillAnswered(b"{}")) == []
    assert one.awaited_leg == "decode"
    assert one.handle(DecodeAnswered(ANSWER)) == [Deliver(ANSWER)]
    assert one.state is State.SETTLED


def test_push_does_not_wait_for_prefill():
    """Where D has all blocks already, it answers first, that is enough, and P need not go on."""
    one = life()
    one.begin()
    assert one.handle(HandedOver(is_prefilled=False)) == []
    assert one.handle(DecodeAnswered(ANSWER)) == [AbortPrefill(), Deliver(ANSWER)]


def test_prefill_that_is_just_answering_is_not_aborted():
    """All KV has been computed and sent: its answer, which tells how fast it is, is on the way."""
    one = life()
    one.begin()
    assert one.handle(HandedOver(is_prefilled=True)) == []
    assert one.handle(DecodeAnswered(ANSWER)) == [Deliver(ANSWER)]


def test_pull_starts_decode_with_what_prefill_answered():
    """First P, then D with P's words unchanged."""
    one = life(Mode.PULL)
    assert one.begin() == [start_p(P1, "t0", Mode.PULL)]
    assert one.handle(PrefillAnswered(b'{"remote":1}')) == [pulls(D1, b'{"remote":1}')]
    assert one.handle(DecodeAnswered(ANSWER)) == [Deliver(ANSWER)]
    assert one.path == "pull"


def test_pull_without_params_from_prefill_is_undivided():
    """A P whose connector says nothing has nothing to be pulled."""
    one = life(Mode.PULL)
    one.begin()
    assert one.handle(PrefillAnswered(None)) == [alone(D1)]
    assert (one.path, one.undivided_reason) == ("undivided", "no_transfer_params")


def test_an_obstacle_makes_the_request_undivided():
    """What cannot be split goes to D alone."""
    one = life(obstacle="beam_search")
    assert one.begin() == [alone(D1)]
    assert (one.path, one.undivided_reason, one.awaited_leg) == ("undivided", "beam_search", "decode")


@pytest.mark.parametrize("mode", Mode)
def test_no_prefill_worker_makes_the_request_undivided(mode):
    """D can do it alone, and says so."""
    one = life(mode, prefill=())
    assert one.begin() == [alone(D1)]
    assert one.undivided_reason == "no_prefill_ready"


@pytest.mark.parametrize("mode", Mode)
def test_no_decode_worker_is_refused_before_prefill_works(mode):
    """Nobody prefills for a D that is not there."""
    assert refusal(life(mode, decode=()).begin()) == (503, "no_decode_worker")


@pytest.mark.parametrize("failure", [P_GONE, P_500])
def test_failed_prefill_is_tried_once_more_elsewhere_and_then_not_at_all(failure):
    """Another P with a new transfer, then D alone."""
    one = life()
    one.begin()
    assert one.handle(PrefillFailed(failure)) == [
        AbortDecode(),
        Retry(failure),
        start_p(P2, "t1"),
        start_d(D1, "t1", P2),
    ]
    assert one.handle(PrefillFailed(failure)) == [AbortDecode(), Retry(failure), alone(D1)]
    assert (one.path, one.undivided_reason) == ("undivided", "prefill_failed")
    assert one.handle(DecodeAnswered(ANSWER)) == [Deliver(ANSWER)]


def test_failed_prefill_in_pull_has_no_decode_to_abort():
    """The same in pull, where D has not begun."""
    one = life(Mode.PULL, prefill=(P1,))
    one.begin()
    assert one.handle(PrefillFailed(P_GONE)) == [Retry(P_GONE), alone(D1)]


def test_a_third_prefill_worker_is_not_tried():
    """A request that kills engines is not shown to all of them."""
    p3 = Engine("http://p3", Role.PREFILL, P1.info)
    one = life(Mode.PULL, prefill=(P1, P2, p3))
    one.begin()
    one.handle(PrefillFailed(P_GONE))
    assert one.handle(PrefillFailed(P_GONE)) == [Retry(P_GONE), alone(D1)]


@pytest.mark.parametrize(("mode", "aborts"), [(Mode.PUSH, [AbortDecode()]), (Mode.PULL, [])])
def test_prefill_rejection_is_delivered_at_once(mode, aborts):
    """The client's mistake is told in P's words, and D is not kept waiting."""
    one = life(mode)
    one.begin()
    assert one.handle(PrefillRejected(REJECTION)) == [*aborts, Deliver(REJECTION)]
    assert one.state is State.SETTLED


def test_late_prefill_is_a_timeout():
    """The client has waited once; it is not made to wait again."""
    one = life()
    one.begin()
    assert refusal(one.handle(PrefillFailed(P_LATE))) == (504, "prefill_timeout")


def test_failed_decode_is_bound_again_while_prefill_goes_on():
    """The same transfer, the next attempt, without the D that failed; P is not troubled."""
    one = life(consumers=2)
    one.begin()
    assert one.handle(DecodeFailed(D_GONE)) == [Retry(D_GONE), start_d(D2, "t0", P1, consumers=2, attempt=1)]
    assert one.handle(PrefillAnswered(b"{}")) == []
    assert one.handle(DecodeAnswered(ANSWER)) == [Deliver(ANSWER)]


def test_failed_decode_after_prefill_is_bound_again_to_what_prefill_keeps():
    """P keeps its blocks for an attempt that may follow; what its connector said is said again."""
    one = life(Mode.PULL)
    one.begin()
    one.handle(PrefillAnswered(b'{"remote":1}'))
    assert one.handle(DecodeFailed(D_GONE)) == [Retry(D_GONE), pulls(D2, b'{"remote":1,"attempt":1}', attempt=1)]


@pytest.mark.parametrize("is_prefilled", [False, True])
def test_kv_that_went_to_the_failed_decode_is_made_anew(is_prefilled):
    """P has given its blocks back: a new transfer, both legs anew."""
    one = life()
    one.begin()
    one.handle(HandedOver(is_prefilled))
    new = [start_p(P1, "t1"), start_d(D2, "t1", P1)]
    assert one.handle(DecodeFailed(D_GONE)) == [Retry(D_GONE), AbortPrefill(), *new]


def test_kv_that_went_to_the_failed_decode_after_prefill():
    """The same with P's leg at its end; the new transfer's first attempt is its first."""
    one = life()
    one.begin()
    one.handle(PrefillAnswered(b"{}"))
    one.handle(HandedOver(is_prefilled=True))
    assert one.handle(DecodeFailed(D_GONE)) == [Retry(D_GONE), start_p(P1, "t1"), start_d(D2, "t1", P1)]


def test_prefill_worker_that_is_gone_has_nothing_to_bind_to():
    """D failed because P is gone, perhaps: another P begins anew."""
    gone = Engine("http://gone", Role.PREFILL, P1.info)
    stock = [gone]
    one = life(prefill=stock)
    one.begin()
    one.handle(PrefillAnswered(b"{}"))
    gone.mark_unready("gone")
    stock[:] = [P2]
    assert one.handle(DecodeFailed(D_GONE)) == [Retry(D_GONE), start_p(P2, "t1"), start_d(D2, "t1", P2)]


def test_prefill_that_fails_after_all_has_arrived_does_not_matter():
    """D needs nothing of it any more."""
    one = life()
    one.begin()
    one.handle(HandedOver(is_prefilled=True))
    assert one.handle(PrefillFailed(P_GONE)) == []
    assert one.handle(DecodeAnswered(ANSWER)) == [Deliver(ANSWER)]


def test_decode_without_room_is_exchanged_for_one_with_room():
    """P is done and D has reserved nothing yet: it is bound to another D, once, and only to one that has room."""
    one = life(decode=(D1, D2, D3), roomy=[D3])
    one.begin()
    one.handle(PrefillAnswered(None))
    abort, retry, start = one.handle(DecodeBehind())
    assert (abort, retry.failure.kind) == (AbortDecode(), FailureKind.BEHIND)
    assert start == start_d(D3, "t0", P1, attempt=1)
    assert one.handle(DecodeBehind()) == []


def test_decode_without_room_is_waited_for_where_nobody_has_room():
    """Its queue is as good as another's, and it has waited there already."""
    one = life(roomy=[])
    one.begin()
    one.handle(PrefillAnswered(b"{}"))
    assert one.handle(DecodeBehind()) == []


def test_decode_that_lacks_little_computes_it_itself():
    """No P is asked; another D, should this one fail, may lack more."""
    one = life(lacking_little=[D1])
    assert one.begin() == [alone(D1)]
    assert (one.path, one.undivided_reason) == ("undivided", "little_missing")
    assert one.handle(DecodeFailed(D_GONE)) == [Retry(D_GONE), start_p(P1, "t0"), start_d(D2, "t0", P1)]
    assert (one.path, one.undivided_reason) == ("push", None)


def test_an_error_of_decodes_own_is_delivered_when_nobody_does_better():
    """The first D's 500 is hidden, the last one's is the answer in its own words."""
    said = Whole(500, (), b"out of cheese")
    failed = DecodeFailed(Failure("decode", FailureKind.SERVER_ERROR, "500"), said)
    one = life()
    one.begin()
    assert one.handle(failed) == [Retry(failed.failure), start_d(D2, "t0", P1, attempt=1)]
    assert one.handle(failed) == [AbortPrefill(), Deliver(said)]


@pytest.mark.parametrize(
    ("chosen", "actions"),
    [
        (Binding.EARLY, [start_d(D1, "t0", P1)]),
        (Binding.JIT, []),
        (Binding.LATE, []),
    ],
)
def test_binding_is_chosen_for_each_request(chosen, actions):
    """`auto` asks when the prefill worker is known, and keeps the reason."""
    one = life(binding=Binding.AUTO, bound=chosen)
    assert one.begin() == [start_p(P1, "t0"), *actions]
    assert (one.binding, one.binding_reason) == (chosen, "why not")


def test_just_in_time_binds_when_told():
    """Until then no D knows of the request."""
    one = life(binding=Binding.JIT)
    assert one.begin() == [start_p(P1, "t0")]
    assert one.handle(BindNow()) == [start_d(D1, "t0", P1)]


@pytest.mark.parametrize("mode", list(Mode))
def test_late_binding_does_not_wait_for_an_answer_of_which_all_is_known(mode):
    """That the prompt is computed is known before P's front end has said so; the answer itself starts nothing then."""
    one = life(mode, binding=Binding.LATE)
    assert one.begin() == [start_p(P1, "t0", mode)]
    assert one.handle(BindNow()) == [start_d(D1, "t0", P1, mode=mode)]
    assert one.handle(PrefillAnswered(b"{}")) == []
    assert one.handle(DecodeAnswered(ANSWER)) == [Deliver(ANSWER)]
    assert (one.binding, one.path) == (Binding.LATE, mode.value)


@pytest.mark.parametrize(
    ("failure", "decode", "error"),
    [
        (D_GONE, (D1,), (502, "decode_failed")),
        (D_SLOW_CONNECT, (D1,), (504, "decode_timeout")),
        (D_LATE, (D1, D2), (504, "decode_timeout")),
    ],
)
def test_failed_decode_without_another_chance_is_an_error(failure, decode, error):
    """The error names the leg; P's leg ends too."""
    one = life(decode=decode)
    one.begin()
    actions = one.handle(DecodeFailed(failure))
    assert actions[0] == AbortPrefill()
    assert refusal(actions) == error


def test_undivided_survives_one_failed_decode():
    """Without a transfer too, another D is tried."""
    one = life(obstacle="several_prompts")
    one.begin()
    assert one.handle(DecodeFailed(D_GONE)) == [Retry(D_GONE), alone(D2)]


def test_decode_that_is_gone_when_prefill_is_done():
    """The last D went while P computed."""
    stock = [D1]
    one = life(Mode.PULL, decode=stock)
    one.begin()
    stock.clear()
    assert refusal(one.handle(PrefillAnswered(b"{}"))) == (503, "no_decode_worker")


EVENTS = [
    PrefillAnswered(b"{}"),
    PrefillRejected(REJECTION),
    PrefillFailed(P_GONE),
    DecodeAnswered(ANSWER),
    DecodeFailed(D_GONE),
    DecodeBehind(),
    HandedOver(is_prefilled=True),
    BindNow(),
]


@pytest.mark.parametrize(
    ("state", "event"), [pair for pair in product(State, EVENTS) if (pair[0], type(pair[1])) not in _HANDLERS]
)
def test_what_cannot_happen_raises(state, event):
    """Every pair that the table lacks is an error that names the state and the event."""
    one = life()
    one.state = state
    with pytest.raises(RuntimeError, match=f"{type(event).__name__}.*{state.name}"):
        one.handle(event)


def test_a_request_begins_once():
    """Legs would run twice otherwise."""
    one = life()
    one.begin()
    with pytest.raises(RuntimeError, match="begins once"):
        one.begin()


def test_the_legs_parameters_are_vllms_names():
    """The connector reads these names; each leg learns what it is to do and D learns where P listens."""
    common = {"transfer_id": "t", "attempt": 0, "num_consumers": 2}
    assert json.loads(prefill_params("t", num_consumers=2, mode=Mode.PULL)) == common | {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_mode": "pull",
    }
    assert json.loads(decode_params("t", num_consumers=2, mode=Mode.PULL, producer=P1.info)) == common | {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_mode": "pull",
        "remote_engine_id": "p1",
        "remote_request_id": "t",
        "remote_host": "h",
        "remote_port": 5,
        "tp_size": 1,
    }


def test_the_decode_worker_is_told_the_prefill_worker_s_key():
    """Where it has one; other connectors never see the name."""
    with_key = replace(P1.info, public_key="k" * 40)

    def said(info):
        return json.loads(decode_params("t", num_consumers=1, mode=Mode.PUSH, producer=info))

    assert said(with_key)["remote_public_key"] == "k" * 40
    assert "remote_public_key" not in said(P1.info)
