"""Compaction empties the windows that cost least, in bounded steps of independent moves, and touches nothing pinned."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_runtime import NoSpace, Shortage
from lab.research.pool.defrag import Relocation, plan_clearing, plan_moves
from lab.research.pool.naive import NaiveUnits
from lab.research.pool.space import PlacedBlock
from tests.support.examples import examples


def at(*starts: int, order: int = 0) -> list[PlacedBlock]:
    return [PlacedBlock(BlockId(start), start, order) for start in starts]


def anything(_: BlockId) -> bool:
    return True


def test_the_emptiest_window_moves_into_the_fullest_ones_holes() -> None:
    blocks = at(0, 4, 5, 6, 8, 9)
    moves = plan_moves(blocks, units=12, order=2, movable=anything, max_moves=1)
    assert moves == [Relocation(BlockId(0), 0, 7, 0)]


def test_a_window_is_emptied_whole_or_not_begun() -> None:
    blocks = at(0, 1, 4, 5)
    assert plan_moves(blocks, units=8, order=2, movable=anything, max_moves=1) == []
    assert len(plan_moves(blocks, units=8, order=2, movable=anything, max_moves=2)) == 2


def test_pinned_blocks_stay_where_they_are_and_may_be_joined() -> None:
    blocks = at(0, 4, 5)
    moves = plan_moves(blocks, units=8, order=2, movable=lambda block: block != 4, max_moves=9)
    assert [move.block for move in moves] == [0]
    assert plan_moves(blocks, units=8, order=2, movable=lambda block: block not in (0, 4), max_moves=9) == []


def test_nothing_is_moved_when_nothing_is_gained() -> None:
    assert plan_moves([], units=8, order=2, movable=anything, max_moves=9) == []
    assert plan_moves(at(0, 1, 2, 3, 4), units=8, order=2, movable=anything, max_moves=9) == []


def test_clearing_takes_the_windows_that_hold_least() -> None:
    blocks = at(0, 1, 4, 8, 9, 10)
    assert plan_clearing(blocks, units=12, order=2, count=1, evictable=anything) == [4]
    assert plan_clearing(blocks, units=12, order=2, count=2, evictable=anything) == [4, 0, 1]
    refused = plan_clearing(blocks, units=12, order=2, count=3, evictable=lambda block: block != 9)
    assert refused == NoSpace(wanted=3, available=2, shortage=Shortage.FRAGMENTED)


layouts = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=30)


def laid(layout: list[tuple[int, int]], units: int) -> tuple[list[PlacedBlock], NaiveUnits]:
    naive = NaiveUnits(units)
    blocks = []
    for where, order in layout:
        start = where >> order << order
        if start + (1 << order) <= units and not any(naive.owners[start : start + (1 << order)]):
            naive.take(start, order=order)
            blocks.append(PlacedBlock(BlockId(len(blocks)), start, order))
    return blocks, naive


@settings(max_examples=examples(300), deadline=None)
@given(layouts, st.integers(4, 41), st.integers(0, 3), st.sets(st.integers(0, 29)), st.integers(0, 8))
def test_any_plan_is_bounded_independent_and_frees_a_run_for_each_window_that_it_empties(
    layout: list[tuple[int, int]], units: int, order: int, pinned: set[int], max_moves: int
) -> None:
    blocks, naive = laid(layout, units)
    before = naive.available(order)
    moves = plan_moves(blocks, units=units, order=order, movable=lambda b: b not in pinned, max_moves=max_moves)
    assert len(moves) <= max_moves
    assert len({move.block for move in moves}) == len(moves)
    for move in moves:
        assert move.block not in pinned
        assert blocks[move.block] == (move.block, move.src, move.order)
        naive.take(move.dst, order=move.order)
    for move in moves:
        naive.free([move.src], order=move.order)
    emptied = {move.src >> order for move in moves}
    assert naive.available(order) == before + len(emptied)


@settings(max_examples=examples(300), deadline=None)
@given(layouts, st.integers(4, 41), st.integers(0, 3), st.sets(st.integers(0, 29)), st.integers(1, 6))
def test_clearing_gives_the_room_or_says_how_much_there_could_be(
    layout: list[tuple[int, int]], units: int, order: int, pinned: set[int], count: int
) -> None:
    blocks, naive = laid(layout, units)
    found = plan_clearing(blocks, units=units, order=order, count=count, evictable=lambda b: b not in pinned)
    gone = [block for block in blocks if block.block not in pinned] if isinstance(found, NoSpace) else found
    for block in blocks:
        if block.block in {b.block if isinstance(b, PlacedBlock) else b for b in gone}:
            assert block.block not in pinned
            naive.free([block.start], order=block.order)
    if isinstance(found, NoSpace):
        assert naive.available(order) == found.available < count
    else:
        assert naive.available(order) >= count
