"""The board on which gateways share the leases of instances.

A load balancer gives each renewal to one of the gateways; the others read it here. What stands here is only news: each
gateway keeps its own leases, so a board that is away, or that has lost everything, takes no instance out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvcontrol.core.ids import InstanceId


class BoardUnavailableError(Exception):
    """The board can't be reached; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """What an instance said last: where it is, for how long that holds, and how much of it is left. An empty ``url`` is
    a goodbye.
    """

    url: str
    ttl_s: float
    left_s: float


class LeaseBoard(Protocol):
    """Both writes and the reading take some seconds at most, and raise ``BoardUnavailableError``."""

    async def post(self, instance: InstanceId, url: str, *, ttl_s: float, age_s: float = 0.0) -> None:
        """Say that an instance said ``age_s`` ago that it is there for ``ttl_s``; with an empty ``url``, that it has
        left. What it said after that, through another gateway, stays.
        """

    async def read(self) -> Mapping[InstanceId, Posted]:
        """Return what holds still."""

    async def close(self) -> None: ...


class NoBoard:
    """There is one gateway: nobody to tell, and nothing to read."""

    async def post(self, instance: InstanceId, url: str, *, ttl_s: float, age_s: float = 0.0) -> None:
        del instance, url, ttl_s, age_s

    async def read(self) -> Mapping[InstanceId, Posted]:
        return {}

    async def close(self) -> None:
        return
