"""Making large runs out of scattered small holes: which blocks to move, or to evict, decided purely.

The region is looked at in *windows*, the aligned places where a block of the wanted size could lie. A window is worth
emptying if it holds little, and can be only if nothing in it is pinned. Compaction empties the emptiest windows into
the holes of the fullest ones; where blocks may go altogether, the windows that cost least are cleared.

``Compactor`` carries a plan out in bounded steps: it reserves destinations, the caller (a migrator) copies, and each
block takes its new place only if it is still there, still unpinned, and its copy succeeded.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_runtime.errors import AllocationError
from kvcontrol.kv_runtime.refusal import NoSpace, Shortage
from lab.research.pool.space import BlockRegion, BlockSpec, PlacedBlock

IsFree = Callable[[BlockId], bool]
"""Whether a block may be moved or evicted: nobody has it pinned."""


class Relocation(NamedTuple):
    """Copy the block's ``2**order`` units from unit ``src`` to unit ``dst``. All of one plan may run at once."""

    block: BlockId
    src: int
    dst: int
    order: int


@dataclass(slots=True)
class _Window:
    """What lies in one aligned place: ``mask`` has a bit for each unit that is taken."""

    start: int
    size: int
    mask: int = 0
    pinned: bool = False
    blocks: list[PlacedBlock] = field(default_factory=list)

    def hole(self, order: int) -> int | None:
        """Return the first free aligned run's offset."""
        run = (1 << (1 << order)) - 1
        for offset in range(0, self.size - (1 << order) + 1, 1 << order):
            if not self.mask >> offset & run:
                return offset
        return None


def plan_moves(
    blocks: Iterable[PlacedBlock], *, units: int, order: int, movable: IsFree, max_moves: int
) -> list[Relocation]:
    """Return at most ``max_moves`` moves that empty as many windows of ``2**order`` units as they can.

    Every window that a plan begins, it empties; destinations are free now, and no block is moved twice, so the moves
    don't depend on each other. An empty plan means that nothing is to be gained (with that many moves). Pinned blocks
    stay. O(units).
    """
    windows = _windows(blocks, units=units, order=order, movable=movable)
    partial = sorted(
        (window for window in windows.values() if 0 < window.mask.bit_count() < window.size),
        key=lambda window: (window.mask.bit_count(), -window.start),
    )
    holes = _Holes(partial[::-1])
    moves: list[Relocation] = []
    for place, window in enumerate(partial):
        if window.pinned or window.size < 1 << order or len(moves) + len(window.blocks) > max_moves:
            continue
        moves += holes.fill(window.blocks, within=len(partial) - place - 1)
    return moves


def plan_clearing(
    blocks: Iterable[PlacedBlock], *, units: int, order: int, count: int, evictable: IsFree
) -> list[BlockId] | NoSpace:
    """Return the blocks whose eviction makes ``count`` runs of an order free, those first that cost the fewest units.

    ``NoSpace`` where pinned blocks leave no such runs, however many others go. O(units).
    """
    size = 1 << order
    windows = _windows(blocks, units=units, order=order, movable=evictable)
    missing = count - (units // size - sum(window.size == size for window in windows.values()))
    cleared: set[BlockId] = set()
    chosen: list[BlockId] = []
    for window in sorted(windows.values(), key=lambda window: (window.mask.bit_count(), window.start)):
        if missing <= 0:
            break
        if window.pinned or window.size < size:
            continue
        missing -= 1
        gone = [block.block for block in window.blocks if block.block not in cleared]
        cleared.update(gone)
        chosen += gone
    if missing > 0:
        return NoSpace(wanted=count, available=count - missing, shortage=Shortage.FRAGMENTED)
    return chosen


class Compactor:
    """Compacts one region in steps. ``movable`` says which blocks nobody has pinned. Not thread-safe."""

    def __init__(self, region: BlockRegion, *, movable: IsFree) -> None:
        self._region = region
        self._movable = movable
        self._targets: dict[Relocation, BlockId] = {}

    def begin(self, spec: BlockSpec, *, max_moves: int) -> list[Relocation]:
        """Plan a step towards room for blocks of ``spec`` and reserve its destinations; empty when none is to make.

        Each move must come back through ``finish``, also when its copy failed or was never tried.
        """
        moves = plan_moves(
            self._region.placed(),
            units=self._region.units,
            order=self._region.order(spec),
            movable=lambda block: self._movable(block) and not self._region.is_moving(block),
            max_moves=max_moves,
        )
        for move in moves:
            self._targets[move] = self._region.begin_move(move.block, move.dst)
        return moves

    def finish(self, move: Relocation, *, copied: bool) -> bool:
        """Settle a move; True if the block lives at its new place now, False if it stays or is gone.

        ``AllocationError`` for a move that isn't under way.
        """
        target = self._targets.pop(move, None)
        if target is None:
            raise AllocationError(f"{move} is not under way")
        return self._region.finish_move(move.block, target, adopt=copied and self._movable(move.block))


def _windows(blocks: Iterable[PlacedBlock], *, units: int, order: int, movable: IsFree) -> dict[int, _Window]:
    """Return the windows that aren't empty, by their number. A larger block stands in each window that it covers."""
    size = 1 << order
    windows: dict[int, _Window] = {}
    for block in blocks:
        stays = not movable(block.block)
        length = 1 << block.order
        for start in range(block.start >> order << order, block.start + length, size):
            window = windows.get(start)
            if window is None:
                window = windows[start] = _Window(start=start, size=min(size, units - start))
            taken = min(length, size)
            window.mask |= ((1 << taken) - 1) << max(0, block.start - start)
            window.pinned |= stays
            window.blocks.append(block)
    return windows


class _Holes:
    """The holes of partly filled windows, the fullest window's first; a plan only ever fills them."""

    def __init__(self, windows: Sequence[_Window]) -> None:
        self._windows = windows
        self._first: dict[int, int] = {}
        """By order: no window before this one has a hole for it."""

    def fill(self, blocks: Iterable[PlacedBlock], *, within: int) -> list[Relocation]:
        """Move all of the blocks into holes of the first ``within`` windows; if one finds none, none moves."""
        moves: list[Relocation] = []
        filled: list[tuple[_Window, int]] = []
        before = dict(self._first)
        for block in sorted(blocks, key=lambda block: -block.order):
            place = self._first.get(block.order, 0)
            hole = None
            while place < within and (hole := self._windows[place].hole(block.order)) is None:
                place += 1
            self._first[block.order] = place
            if hole is None:
                for window, run in filled:
                    window.mask &= ~run
                self._first = before
                return []
            window = self._windows[place]
            run = ((1 << (1 << block.order)) - 1) << hole
            window.mask |= run
            filled.append((window, run))
            moves.append(Relocation(block.block, block.start, window.start + hole, block.order))
        return moves
