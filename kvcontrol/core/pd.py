"""How a gateway names one prompt's KV cache to the two instances that share a request: one prefills, one decodes.

By migration a prompt goes under a ticket (``hold``, ``fetch``); through the tiers its blocks have names of their own
and need none (``save``, ``load``).

A ticket is 128 random bits, made by the gateway for one request. The prefill instance keeps the prompt's blocks under
it; whoever shows the ticket may fetch them, once. The header is set by the gateway alone; a client's is dropped.
"""

import re
import secrets
from dataclasses import dataclass
from typing import NewType

import msgspec

PD_HEADER = "x-kvgate-pd"
"""Request header from the gateway to an engine: ``hold;ticket=HEX`` or ``fetch;ticket=HEX;from=HOST:PORT``; ``save`` or
``load;from=HOST:PORT``."""

Ticket = NewType("Ticket", str)
"""32 lower-case hex digits."""

TICKET_BYTES = 16
_PLACE = r"([\w.:%\[\]-]{1,253}):(\d{1,5})"
_ENDPOINT = re.compile(_PLACE, re.ASCII)
_HOLD = re.compile(r"hold;ticket=([0-9a-f]{32})")
_FETCH = re.compile(rf"fetch;ticket=([0-9a-f]{{32}});from={_PLACE}", re.ASCII)
_LOAD = re.compile(rf"load;from={_PLACE}", re.ASCII)
_SAVE = "save"
_LARGEST_PORT = 65_535


class PdHeaderError(ValueError):
    """The header is not what is allowed; the message never repeats a ticket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Compute the prompt and its first token, and keep the blocks under this ticket."""

    ticket: Ticket

    def __str__(self) -> str:
        return f"hold;ticket={self.ticket}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Take the prompt's blocks from ``host:port`` and go on from there."""

    ticket: Ticket
    host: str
    port: int

    def __str__(self) -> str:
        return f"fetch;ticket={self.ticket};from={self.host}:{self.port}"

    @property
    def source(self) -> str:
        """Where the blocks come from, as ``host:port``."""
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Compute the prompt, whose blocks go to the tiers below HBM, and no more than one token."""

    def __str__(self) -> str:
        return _SAVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Take the prompt's blocks that are not here from the tiers of the instance at ``host:port``."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"load;from={self.source}"

    @property
    def source(self) -> str:
        """Where the blocks come from, as ``host:port``."""
        return f"{self.host}:{self.port}"


PdDuty = Hold | Fetch | Save | Load
"""What one instance does of a separated request."""


class PdStats(msgspec.Struct, frozen=True, kw_only=True):
    """One instance's part in prefill/decode separation; totals since its start.

    ``endpoint`` is where a prefill instance serves held blocks (``host:port``), empty elsewhere. ``held_requests`` and
    ``held_blocks`` wait there to be fetched now; ``handed_over`` were fetched whole, ``expired`` ran into the end of
    their lease, ``released`` ended some other way (a client left, an operator freed them). On a decode instance
    ``fetched`` requests went on from another's blocks, ``recomputed`` could not, by reason, and prefilled themselves.
    An instance that hands over through its tiers does both, and holds nothing. ``transfer_s`` is what fetching took.
    """

    endpoint: str = ""
    held_requests: int = 0
    held_blocks: int = 0
    handed_over: int = 0
    expired: int = 0
    released: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    recomputed: dict[str, int] = {}
    transfer_s: float = 0.0


def new_ticket() -> Ticket:
    """Return one that nobody can guess."""
    return Ticket(secrets.token_hex(TICKET_BYTES))


def parse_pd_header(value: str) -> PdDuty:
    """Read a ``PD_HEADER``; raises ``PdHeaderError``."""
    if hold := _HOLD.fullmatch(value):
        return Hold(ticket=Ticket(hold.group(1)))
    if value == _SAVE:
        return Save()
    if (fetch := _FETCH.fullmatch(value)) and (port := _port(fetch.group(3))):
        return Fetch(ticket=Ticket(fetch.group(1)), host=fetch.group(2).strip("[]"), port=port)
    if (load := _LOAD.fullmatch(value)) and (port := _port(load.group(2))):
        return Load(host=load.group(1).strip("[]"), port=port)
    raise PdHeaderError(
        f"{PD_HEADER} is not hold;ticket=HEX or fetch;ticket=HEX;from=HOST:PORT with 32 lower-case hex digits, "
        "nor save or load;from=HOST:PORT"
    )


def parse_endpoint(endpoint: str) -> tuple[str, int] | None:
    """Return the host and the port of a ``PdStats.endpoint``, None for one that no ``PD_HEADER`` can name."""
    place = _ENDPOINT.fullmatch(endpoint)
    port = _port(place.group(2)) if place else 0
    return (place.group(1).strip("[]"), port) if place and port else None


def _port(text: str) -> int:
    """Return a port, 0 for what is none."""
    port = int(text)
    return port if port <= _LARGEST_PORT else 0
