"""The prefill instance's side of a handover: sends the blocks held under a ticket, once."""

from collections.abc import Iterator
from typing import Protocol

from engines.lmdeploy.pd.wire import (
    GO,
    RELEASED,
    TAKEN,
    Connection,
    Offer,
    TransferError,
    answer,
    expect,
    read_ticket,
    send_frames,
)
from kvcontrol.core.pd import Ticket


class Larder(Protocol):
    """The held prompts, for the server's threads; every call is bounded in time."""

    def begin(self, ticket: Ticket) -> Offer:
        """Describe a held prompt and keep it until ``end``; raises ``TransferError``."""

    def pieces(self, offer: Offer) -> Iterator[memoryview]:
        """Give the bytes of its blocks."""

    def still(self, ticket: Ticket) -> bool:
        """Whether the bytes sent are still those of the ticket."""

    def end(self, ticket: Ticket, *, taken: bool) -> None:
        """End a reading that ``begin`` began."""


def hand_over(larder: Larder, connection: Connection) -> None:
    """Serve one connection; raises ``TransferError``."""
    ticket = read_ticket(connection)
    try:
        offer = larder.begin(ticket)
    except TransferError as error:
        answer(connection, error)
        return
    taken = False
    try:
        answer(connection, offer)
        expect(connection, GO)
        send_frames(connection, _while_held(larder, offer, ticket))
        expect(connection, TAKEN)
        taken = True
    finally:
        larder.end(ticket, taken=taken)
    connection.send(RELEASED)


def _while_held(larder: Larder, offer: Offer, ticket: Ticket) -> Iterator[memoryview]:
    """Give the pieces, and fail instead of ending when their blocks were taken away meanwhile."""
    yield from larder.pieces(offer)
    if not larder.still(ticket):
        raise TransferError("refused", "the prompt was given up while it was read")
