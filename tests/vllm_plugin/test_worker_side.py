"""The worker's half of the connector, without its mover's thread."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvberth.mover.results import Results
from kvberth.protocol import Reason, ReportReceived
from kvberth.protocol.ids import RequestId
from kvberth.vllm_plugin.settings import ConnectorSettings
from kvberth.vllm_plugin.worker_side import WorkerSide

RECEIVED = Results(received=[ReportReceived(RequestId("r"), ok=True, reason=Reason.NONE)])
RELEASED = Results(released={RequestId("r")})
NOTHING = Results()


class Mover:
    """Has these results ready, one after the other; keeps for how long each was waited for."""

    def __init__(self, *results: Results) -> None:
        self._results = list(results)
        self.waits: list[float] = []

    def take(self, wait_seconds: float) -> Results:
        self.waits.append(wait_seconds)
        return self._results.pop(0)


def side_with(mover: Mover) -> WorkerSide:
    side = WorkerSide(ConnectorSettings(), {}, engine_id="e", rank=0, num_blocks=1, listen_port=None)
    side._mover = mover
    return side


@pytest.mark.parametrize("news", [RECEIVED, RELEASED])
def test_news_is_not_held_up_by_a_wait_for_more(news):
    """vLLM schedules ahead: it looks at what this step has said when the next step has been made, which waits here."""
    mover = Mover(NOTHING, news, NOTHING, NOTHING)
    side = side_with(mover)
    for _ in range(4):
        side.poll(has_forward=False)
    waited = mover.waits[0]
    assert waited > 0
    assert mover.waits == [waited, waited, 0, waited]


def test_a_forward_pass_waits_for_nothing():
    """The device is busy; what comes meanwhile is there for the next step."""
    mover = Mover(NOTHING, RECEIVED, NOTHING)
    side = side_with(mover)
    told = [side.poll(has_forward=True) for _ in range(3)]
    assert mover.waits == [0, 0, 0]
    assert told[1] == (set(), {"r"}, set())
