"""A batch's transfer in one lane, with the checksums that belong to it.

Of bytes that come from the engine a checksum is taken when they are in the arena; of bytes that leave the arena for
the engine it is compared, beside the copy. A durable tier compares its own (``DurableBackendProtocol``).
"""

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.backend_protocol import (
    BlockStatus,
    DurableBackendProtocol,
    KVBackendProtocol,
    Move,
    OrderedBackendProtocol,
)
from kvcontrol.kv_runtime.checksums import Checksums
from kvcontrol.kv_runtime.crew import Crew
from kvcontrol.kv_runtime.lane import Batch, Lane, LaneName
from kvcontrol.kv_runtime.plan import PlanId, Route
from kvcontrol.kv_runtime.record import BlockSeal

READS: Final = (LaneName.HBM_TO_DDR, LaneName.NVME_TO_DDR)
"""Lanes that fill the arena; the others empty it."""
_OK: Final = BlockStatus.OK
_CHUNK_BYTES: Final = 1 << 20
"""A helper is not worth its while for checksums of less."""
_AHEAD_S: Final = 0.1
"""How long a checksum that was begun ahead stands for the bytes that are copied."""


class _Ahead(NamedTuple):
    """Checksums of arena slots that were begun before the transfer."""

    hosts: list[int]
    begun_s: float
    sums: Callable[[], list[int]]


class Carrier:
    """See the module's text; called by any number of workers, each with a batch of its own.

    ``report_queued`` hears of blocks that were verified and queued on the engine's device, if it keeps an order.
    """

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        *,
        engine: KVBackendProtocol,
        arena: HostArena,
        durable: DurableBackendProtocol | None,
        crew: Crew,
        checksums: Checksums,
        report_queued: Callable[[PlanId, int], None],
        ahead_bytes: int,
    ) -> None:
        self._ordered = engine if isinstance(engine, OrderedBackendProtocol) else None
        self._arena = arena
        self._durable = durable
        self._crew = crew
        self._sum = checksums
        self._report_queued = report_queued
        self._ahead_bytes = ahead_bytes
        self._ahead: _Ahead | None = None

    def check_ahead(self, hosts: list[int]) -> None:
        """Begin to compute the checksums of slots that will leave the arena for the engine within ``_AHEAD_S``.

        They are held by then: their bytes stay. Nothing is begun for few bytes, nor while others are waited for.
        """
        ahead, now_s = self._ahead, time.monotonic()
        idle = ahead is None or now_s - ahead.begun_s > _AHEAD_S
        if idle and len(hosts) * self._arena.block_bytes >= self._ahead_bytes:
            self._ahead = _Ahead(hosts, now_s, self._checksums(hosts))

    def carry(self, lane: Lane, batch: Batch) -> list[BlockStatus]:
        """Do the transfer; the statuses of all routes, in order."""
        if batch.abandoned is not None:
            return batch.given_up(batch.abandoned)
        if batch.erase:
            return self._erase(batch.erase)
        transfer = self._read if lane.name in READS else self._write
        if batch.statuses.count(_OK) == len(batch.statuses):
            moves = _moves(lane.name, batch.routes, batch.checksums)
            results = transfer(lane, batch, range(len(moves)), moves)
            if len(results) != len(moves):
                raise ValueError(f"{lane.name}: {len(results)} statuses for {len(moves)} blocks")
            return results
        wanted = [place for place, status in enumerate(batch.statuses) if status is _OK]
        moves = _moves(lane.name, [batch.routes[place] for place in wanted], [batch.checksums[p] for p in wanted])
        results = list(batch.statuses)
        for place, status in zip(wanted, transfer(lane, batch, wanted, moves), strict=True):
            results[place] = status
        return results

    def _read(self, lane: Lane, batch: Batch, places: Sequence[int], moves: list[Move]) -> list[BlockStatus]:
        statuses = lane.backend.read(moves, self._arena)
        ended = zip(places, moves, statuses, strict=True)
        good = [(place, move.host) for place, move, status in ended if status is _OK]
        if lane.name is LaneName.HBM_TO_DDR:
            sums = self._checksums([host for _, host in good])()
            for (place, _), value in zip(good, sums, strict=True):
                batch.checksums[place] = value
        if self._arena.durable:
            for place, _ in good:
                self._seal(batch.routes[place], batch.checksums[place])
        return statuses

    def _write(self, lane: Lane, batch: Batch, places: Sequence[int], moves: list[Move]) -> list[BlockStatus]:
        if lane.name is not LaneName.DDR_TO_HBM:
            return lane.backend.write(moves, self._arena)
        if batch.hop > 0:  # the durable tier has compared them
            return self._write_engine(lane, moves, lambda: self._report_queued(batch.plan_id, len(moves)))
        wanted = [batch.checksums[place] for place in places]
        sums = self._begun([move.host for move in moves])
        found: list[int] = []

        def compare() -> None:
            found.extend(sums())
            if found == wanted:
                self._report_queued(batch.plan_id, len(moves))

        statuses = self._write_engine(lane, moves, compare)
        return [
            status if value == expected else BlockStatus.CORRUPT
            for status, value, expected in zip(statuses, found or sums(), wanted, strict=True)
        ]

    def _write_engine(self, lane: Lane, moves: list[Move], queued: Callable[[], None]) -> list[BlockStatus]:
        if self._ordered is None:
            return lane.backend.write(moves, self._arena)
        return self._ordered.write_in_order(moves, self._arena, queued)

    def _seal(self, route: Route, value: int | None) -> None:
        if value is not None:
            self._arena.seal(route.host, BlockSeal(route.record, value))

    def _erase(self, slots: Sequence[int]) -> list[BlockStatus]:
        if self._durable is None:
            raise ValueError("slots to erase are in no durable tier")
        return self._durable.erase(slots)

    def _begun(self, hosts: list[int]) -> Callable[[], list[int]]:
        """Return the transfer that ``check_ahead`` began for these slots, else begin one."""
        ahead = self._ahead
        if ahead is not None and ahead.hosts == hosts and time.monotonic() - ahead.begun_s <= _AHEAD_S:
            self._ahead = None
            return ahead.sums
        return self._checksums(hosts)

    def _checksums(self, hosts: list[int]) -> Callable[[], list[int]]:
        """Begin to compute arena slots' checksums, spread over the crew's helpers."""
        size = max(1, _CHUNK_BYTES // self._arena.block_bytes, -(-len(hosts) // self._crew.helpers))
        if len(hosts) * self._arena.block_bytes <= _CHUNK_BYTES:
            return lambda: self._sum(self._arena, hosts)
        parts = [
            self._crew.compute(lambda part=hosts[start : start + size]: self._sum(self._arena, part))  # type: ignore[misc]
            for start in range(0, len(hosts), size)
        ]
        return lambda: [value for part in parts for value in part()]


def _moves(name: LaneName, routes: Sequence[Route], checksums: Sequence[int | None]) -> list[Move]:
    """Return the moves for a lane's backend; only durable tiers get seals."""
    new = tuple.__new__  # a third of what the constructor takes, which is Python
    match name:
        case LaneName.HBM_TO_DDR:
            return [new(Move, (route.source, route.host, None)) for route in routes]
        case LaneName.DDR_TO_HBM:
            return [new(Move, (route.target, route.host, None)) for route in routes]
    slots = [route.source if name is LaneName.NVME_TO_DDR else route.target for route in routes]
    return [
        Move(slot, route.host, None if value is None else BlockSeal(route.record, value))
        for slot, route, value in zip(slots, routes, checksums, strict=True)
    ]
