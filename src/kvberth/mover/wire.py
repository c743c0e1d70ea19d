"""What both sides of a rank need of the world, and what they share."""

import logging
from typing import Protocol

import msgspec

from kvberth.layout import LayoutError, Region, Runs, TokenSpace, plan_runs, plan_tokens
from kvberth.mover.address import Address
from kvberth.mover.flights import Flights
from kvberth.mover.inbox import Outbox
from kvberth.mover.results import TransferReport
from kvberth.protocol import EndRecord, EngineCard, Reason
from kvberth.transport import Transport, TransportError

__all__ = ["Wire", "block_error", "card_error", "disconnect", "plan_transfer", "report_end"]

_log = logging.getLogger(__name__)

_MAX_NAME = 256
_MAX_BLOCKS = 2**31
_ADDRESS_SPACE = 2**64


class Wire(Protocol):
    """What the core needs of the control channel."""

    def resolve(self, address: Address, now: float) -> Address:
        """The address with the producer's public key as its identity. Raises `NotAccepted` if we do not talk to it."""

    def dial(self, address: Address) -> None: ...
    def hang_up(self, address: Address) -> None: ...
    def send_to_client(self, route: bytes, frame: bytes) -> bool:
        """False if nobody is connected there any more."""

    def send_to_server(self, address: Address, frame: bytes) -> None: ...


def block_error(blocks: tuple[int, ...], block_size: int, card: EngineCard) -> str:
    """Why these cannot be blocks of that engine; empty when they can."""
    if block_size != card.fingerprint.block_size:
        return f"its blocks have {card.fingerprint.block_size} tokens, not {block_size}"
    if not blocks:
        return ""
    if len(blocks) > card.num_blocks:
        return f"{len(blocks)} blocks are named, and its region has {card.num_blocks}"
    low, high = min(blocks), max(blocks)
    if low < 0 or high >= card.num_blocks:
        outside = low if low < 0 else high
        return f"block {outside} is outside of the region's {card.num_blocks} blocks"
    if len(set(blocks)) != len(blocks):
        return "a block is named twice"
    return ""


def card_error(card: EngineCard) -> str:
    """Why this cannot be an engine's card; empty when it can.

    What is checked here is calculated with later: regions that are not there would be refused by the transport.
    """
    names, fingerprint = (card.engine_id, card.incarnation), card.fingerprint
    if not all(0 < len(name) <= _MAX_NAME and name.isprintable() for name in names):
        return f"its name is not 1 to {_MAX_NAME} printable characters"
    if card.rank < 0 or fingerprint.block_size < 1 or not 1 <= card.num_blocks <= _MAX_BLOCKS:
        return f"rank {card.rank} with {card.num_blocks} blocks of {fingerprint.block_size} tokens"
    if fingerprint.tokens is not None and min(msgspec.structs.astuple(fingerprint.tokens)) < 1:
        return "its blocks hold no tokens"
    if not card.regions or tuple(region.block_length for region in card.regions) != fingerprint.block_lengths:
        return "its regions are not those of its fingerprint"
    return next((error for region in card.regions if (error := _region_error(region, card.num_blocks))), "")


def _region_error(region: Region, num_blocks: int) -> str:
    if not 0 < region.block_length <= region.block_stride:
        return f"a region has blocks of {region.block_length} bytes every {region.block_stride}"
    if region.address < 0 or region.address + num_blocks * region.block_stride > _ADDRESS_SPACE:
        return "a region is outside of the address space"
    return "" if region.device_index >= 0 else f"a region is on device {region.device_index}"


def plan_transfer(
    ours: EngineCard, theirs: EngineCard, local_blocks: tuple[int, ...], remote_blocks: tuple[int, ...]
) -> Runs:
    """The descriptors of a transfer, or of a part of one.

    Args:
        local_blocks, remote_blocks: block ids; of engines with different block sizes, units of the smaller ones.

    Raises:
        LayoutError: the two sides do not fit.
    """
    mine, its = ours.fingerprint, theirs.fingerprint
    if mine.has_blocks_like(its):
        return plan_runs(ours.regions, theirs.regions, local_blocks, remote_blocks)
    if mine.tokens is None or its.tokens is None:
        raise LayoutError("it is not known how tokens lie within a block")
    return plan_tokens(
        TokenSpace(ours.regions, mine.block_size, mine.tokens),
        TokenSpace(theirs.regions, its.block_size, its.tokens),
        local_blocks,
        remote_blocks,
        min(mine.block_size, its.block_size),
    )


def disconnect(transport: Transport, agent: str, *, is_live: bool) -> None:
    """Cut a peer off; that it cannot be done again is not our trouble."""
    try:
        transport.remove_peer(agent, is_live=is_live)
    except TransportError as error:
        _log.warning("kvberth: %s", error)


def report_end(record: EndRecord, flights: Flights, outbox: Outbox) -> None:
    """Log an end that is not as it should be, and hand it to the metrics."""
    if record.reason not in {Reason.NONE, Reason.NOT_NEEDED}:
        detail = f" ({record.detail})" if record.detail else ""
        text = record.reason.text
        _log.warning("kvberth: transfer %s %s on the %s: %s%s", record.key, record.end, record.role, text, detail)
    effort = flights.take_effort(record.key)
    outbox.report(TransferReport(record, effort.post_seconds, effort.num_runs))
