"""All dashboards, one file each."""

from typing import Final

from dashboards.boards import fleet, instance, long_context, slo, tenants, tiers
from dashboards.panel import Board

BOARDS: Final[tuple[Board, ...]] = (
    fleet.BOARD,
    instance.BOARD,
    tiers.BOARD,
    tenants.BOARD,
    long_context.BOARD,
    slo.BOARD,
)

__all__ = ["BOARDS"]
