"""The tables: complete for what a peer can do at any time, and in step with the handlers."""

import ast
from pathlib import Path

import pytest
from tools.state_diagrams import TARGET, page

import kvberth.protocol
from kvberth.protocol import Consumer, Producer, Reason, Timing, TransferKey
from kvberth.protocol.consumer_states import CONSUMER_TABLE, ConsumerState
from kvberth.protocol.errors import UnexpectedEvent
from kvberth.protocol.events import (
    CancelReceived,
    ConsumerEvent,
    DoneReceived,
    PeerReady,
    ProducerEvent,
    RegisterReceived,
    StatusAsked,
    WritesDone,
)
from kvberth.protocol.ids import PeerName
from kvberth.protocol.producer_states import PRODUCER_TABLE, ProducerState
from kvberth.protocol.table import mermaid


@pytest.mark.parametrize("event", [RegisterReceived, CancelReceived, DoneReceived, StatusAsked])
@pytest.mark.parametrize("state", list(ProducerState))
def test_no_message_of_a_peer_is_unexpected(state, event):
    """Whatever a decode worker sends, and whenever, P has a row for it."""
    assert (state, event) in PRODUCER_TABLE


@pytest.mark.parametrize(
    ("table", "events"),
    [(PRODUCER_TABLE, ProducerEvent), (CONSUMER_TABLE, ConsumerEvent)],
    ids=["producer", "consumer"],
)
def test_table_names_known_events_and_all_of_them(table, events):
    """Every event of the union is used, and nothing else."""
    assert {event for _, event in table} == set(events.__args__)


@pytest.mark.parametrize(
    ("table", "states"),
    [(PRODUCER_TABLE, ProducerState), (CONSUMER_TABLE, ConsumerState)],
    ids=["producer", "consumer"],
)
def test_every_state_is_reached(table, states):
    """No state stands in the table that nothing leads to."""
    reached = {target for targets in table.values() for target in targets}
    assert reached | {states.NEW} == set(states)


def test_impossible_event_raises_and_names_it():
    """A bug of ours is loud: it names the transfer, the state and the event, and leaves nothing behind."""
    producer = Producer(16, Timing())
    with pytest.raises(UnexpectedEvent, match="transfer t-9: no WritesDone in state new"):
        producer.handle(TransferKey("t-9"), WritesDone(0, 0), 0.0)
    assert producer.state(TransferKey("t-9")) is None


def test_event_of_an_unknown_transfer_is_stale_for_a_consumer():
    """What comes for a transfer that is over does nothing."""
    consumer = Consumer(16, Timing())
    assert consumer.handle(TransferKey("t-9"), PeerReady(PeerName("P/0/a")), 0.0) == []


def test_reasons_all_have_a_text():
    """Every reason can be told to people."""
    assert all(reason.text for reason in Reason)


def test_diagram_shows_the_happy_path():
    """The docs' diagram is made from the table."""
    diagram = mermaid(PRODUCER_TABLE)
    assert diagram.startswith("stateDiagram-v2")
    assert "    matched --> streaming: PrefillAdvanced" in diagram
    assert "    streaming --> writing: PrefillAdvanced, PrefillFinished" in diagram
    assert "    writing --> ended: WritesDone" in diagram


@pytest.mark.parametrize("package", ["protocol", "layout"])
def test_core_is_free_of_io(package):
    """No clock, no thread, no socket, no engine in the packages that decide."""
    forbidden = {"torch", "zmq", "nixl", "vllm", "threading", "logging", "time", "socket", "asyncio", "os"}
    folder = Path(kvberth.protocol.__file__).parent.parent / package
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & forbidden, file.name


def test_documented_states_are_those_of_the_tables():
    """`docs/design/states.md` is up to date; `python tools/state_diagrams.py` makes it so."""
    assert TARGET.read_text() == page()
