"""The wire format."""

import typing

import pytest
from hypothesis import example, given
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
from kvberth.protocol.messages import MAX_FRAME_BYTES, Ended, Heartbeat, Hello, Register, sealed

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

REGISTRATION = Register(
    key=TransferKey("t"),
    attempt=0,
    mode=TransferMode.PUSH,
    first_token=0,
    num_tokens=16,
    prompt_digest=b"d" * 16,
    block_size=16,
    blocks=(1,),
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
    frame = sealed(b"of other shape", version=9)
    with pytest.raises(VersionMismatch, match=f"ours {PROTOCOL_VERSION}, theirs 9") as caught:
        decode(frame)
    assert caught.value.theirs == 9


def test_version_from_before_checksums_is_told_too():
    """There the map begins where the checksum is now."""
    with pytest.raises(VersionMismatch) as caught:
        decode(b"\x00\x02\x82\xa4type\xa8accepted")
    assert caught.value.theirs == 2


@pytest.mark.parametrize(
    "frame", [b"", b"\x00", b"\x00\x03", sealed(b""), sealed(b"\xc1"), sealed(b"\x80"), sealed(bytes(MAX_FRAME_BYTES))]
)
def test_rubbish_is_malformed(frame):
    """Too short, too long, or not one of our messages."""
    with pytest.raises(MalformedMessage):
        decode(frame)


@given(st.binary(max_size=200))
def test_any_bytes_decode_to_a_message_or_to_an_error_of_ours(payload):
    """A stranger's bytes never raise anything but a peer's error."""
    try:
        message = decode(sealed(payload))
    except MalformedMessage:
        return
    assert isinstance(message, typing.get_args(Message))


@given(st.integers(0), st.integers(1, 2**24 - 1))
@example(at=len(encode(REGISTRATION)) - 1, noise=1)  # another block id
@example(at=1, noise=PROTOCOL_VERSION ^ 9)  # another version
def test_damage_on_the_way_is_found(at, noise):
    """Wherever it is, whatever it makes of the message: a block id would name another request's memory."""
    frame = bytearray(encode(REGISTRATION))
    at %= len(frame)
    wrong = noise.to_bytes(3, "big")[: len(frame) - at]
    for offset, bits in enumerate(wrong):
        frame[at + offset] ^= bits
    if not any(wrong):
        assert decode(bytes(frame)) == REGISTRATION
        return
    with pytest.raises((MalformedMessage, VersionMismatch)) as caught:
        decode(bytes(frame))
    if isinstance(caught.value, VersionMismatch):
        assert caught.value.theirs < PROTOCOL_VERSION  # whose frames have no checksum


@given(st.binary(min_size=1, max_size=20), st.data())
def test_wrong_registration_is_an_error_or_a_registration(noise, data):
    """A peer that seals rubbish: its frames are nearly right."""
    body = bytearray(encode(REGISTRATION)[6:])
    at = data.draw(st.integers(0, len(body) - 1))
    body[at : at + len(noise)] = noise
    try:
        message = decode(sealed(bytes(body)))
    except MalformedMessage:
        return
    assert isinstance(message, typing.get_args(Message))
