"""The wire format."""

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvberth.layout import Fingerprint, Region
from kvberth.protocol import (
    PROTOCOL_VERSION,
    End,
    EngineCard,
    MalformedMessage,
    Message,
    Reason,
    TransferKey,
    TransferMode,
    VersionMismatch,
    decode,
    encode,
)
from kvberth.protocol.messages import MAX_FRAME_BYTES, Accepted, Ended, Heartbeat, Hello, Register

CARD = EngineCard(
    engine_id="P",
    incarnation="a",
    rank=0,
    fingerprint=Fingerprint(
        model="m@1",
        dtype="float32",
        kv_cache_dtype="auto",
        num_layers=2,
        num_kv_heads=3,
        head_size=64,
        block_size=16,
        layout="LBHNC",
        tensor_parallel_size=1,
        block_lengths=(128, 128),
    ),
    regions=(Region(address=2**47, block_stride=128, block_length=128),),
    num_blocks=10,
    agent_metadata=b"\x00\xff",
)


@pytest.mark.parametrize(
    "message",
    [
        Hello(CARD, 1),
        Heartbeat(((TransferKey("t", 1), 2),)),
        Register(
            key=TransferKey("t"),
            attempt=0,
            mode=TransferMode.PULL,
            first_token=16,
            num_tokens=40,
            prompt_digest=b"d",
            block_size=16,
            blocks=(3, 1),
        ),
        Ended(TransferKey("t"), 0, End.FAILED, Reason.TRANSPORT, "why", 1, 2),
    ],
)
def test_message_survives_the_wire(message):
    """What is decoded equals what was encoded."""
    assert decode(encode(message)) == message


def test_other_version_is_told_with_both_numbers():
    """A frame of version 9 is not guessed at."""
    frame = (9).to_bytes(2, "big") + encode(Accepted(TransferKey("t"), 0))[2:]
    with pytest.raises(VersionMismatch, match=f"ours {PROTOCOL_VERSION}, theirs 9") as caught:
        decode(frame)
    assert caught.value.theirs == 9


@pytest.mark.parametrize(
    "frame", [b"", b"\x00", b"\x00\x02", b"\x00\x02\xc1", b"\x00\x02\x80", bytes(MAX_FRAME_BYTES + 1)]
)
def test_rubbish_is_malformed(frame):
    """Too short, too long, or not one of our messages."""
    with pytest.raises(MalformedMessage):
        decode(frame)


@given(st.binary(max_size=200))
def test_any_bytes_decode_to_a_message_or_to_an_error_of_ours(payload):
    """A stranger's bytes never raise anything but a peer's error."""
    try:
        message = decode(PROTOCOL_VERSION.to_bytes(2, "big") + payload)
    except MalformedMessage:
        return
    assert isinstance(message, typing.get_args(Message))


@given(st.binary(min_size=1, max_size=20), st.data())
def test_damaged_registration_is_an_error_or_a_registration(noise, data):
    """The same for frames that are nearly right."""
    registration = Register(
        key=TransferKey("t"),
        attempt=0,
        mode=TransferMode.PUSH,
        first_token=0,
        num_tokens=16,
        prompt_digest=b"d" * 16,
        block_size=16,
        blocks=(1,),
    )
    frame = bytearray(encode(registration))
    at = data.draw(st.integers(2, len(frame) - 1))
    frame[at : at + len(noise)] = noise
    try:
        message = decode(bytes(frame))
    except MalformedMessage:
        return
    assert isinstance(message, typing.get_args(Message))
