"""Paths made ahead, on LMDeploy's own block trie: what hangs in the end is what LMDeploy would have hung."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.control.guard import Guard
from engines.events.log import EventLog
from engines.lmdeploy.hooks import event_hooks, eviction_hooks, tenant_hooks, tier_hooks
from engines.lmdeploy.patching import install
from engines.lmdeploy.trie.deferral import MOST_S, Deferral
from engines.lmdeploy.trie.events import TrieTracker
from engines.lmdeploy.trie.eviction import eviction_of
from engines.lmdeploy.trie.path import SLICE_BLOCKS, PathMaker
from kvcontrol.core.blocks import CacheIdentity, CacheTier
from tests.support.block_trie import BLOCK_TOKENS, Paging, prompt

IDENTITY = CacheIdentity(model="m", revision="1", kv_dtype="float32", block_size_tokens=BLOCK_TOKENS)


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    undo = install([*event_hooks(), *eviction_hooks(), *tenant_hooks(), *tier_hooks()])
    yield
    undo()


class Told:
    """A trie whose requests may come with a path made ahead, and the events that it tells."""

    def __init__(self, blocks: int = 1_000) -> None:
        self.paging = Paging(blocks)
        self.log = EventLog(block_size_tokens=BLOCK_TOKENS, clock=lambda: 0.0, on_pending=lambda: None)
        self.tracker = TrieTracker(self.log, IDENTITY)
        self.tracker.watch(self.paging.trie)
        self.guard = Guard()
        self.maker = PathMaker(self.guard, grace_s=0.0)
        self.sequences: list[Any] = []

    def begin(self, tokens: list[int], *, ahead: int | None = None, salt: str = "", deferral: bool = False) -> Any:
        """A request; ``ahead``: so many of its blocks are made ahead, None: as LMDeploy does."""

        def between(seq: Any) -> None:
            if ahead is not None:
                self.make(seq, ahead)
            if deferral:
                self.tracker.deferral.begin(0.1)

        seq = self.paging.begin(tokens, salt=salt, between=between)
        assert seq is not None
        self.sequences.append(seq)
        return seq

    def make(self, seq: Any, last_block: int) -> None:
        self.maker.begin(self.paging.trie, seq, last_block)
        while self.maker.work():
            pass

    def end(self, seq: Any) -> None:
        self.sequences.remove(seq)
        self.paging.end(seq)

    def check(self) -> None:
        assert self.guard.errors == self.tracker.errors == 0
        eviction = eviction_of(self.paging.trie)
        assert eviction is not None
        eviction.check_integrity(self.paging.trie)

    def shape(self) -> Any:
        return [_below(root) for _, root in sorted(self.paging.trie._roots.items(), key=str)]

    def resident(self) -> Any:
        _, resident = self.log.snapshot()
        return resident.tiers

    def batches(self) -> Any:
        return [batch.payload for batch in self.log.publish()]


def _below(node: Any) -> Any:
    return sorted(
        (tuple(child.token_ids.tolist()), child.prefix_len, child.extra_identity, child.parent is node, _below(child))
        for child in node.children.values()
    )


def test_a_path_made_ahead_hangs_as_lmdeploy_hangs_it_and_is_told_alike() -> None:
    plain, ahead = Told(), Told()
    plain.begin(prompt(1, 200), salt="s")
    ahead.begin(prompt(1, 200), ahead=200, salt="s")
    assert ahead.shape() == plain.shape()
    assert ahead.resident() == plain.resident()
    assert ahead.batches() == plain.batches()
    ahead.check()
    assert ahead.paging.serve(prompt(1, 200), salt="s") == 200 * BLOCK_TOKENS


def test_it_is_made_in_slices() -> None:
    told = Told()
    calls = []

    def between(seq: Any) -> None:
        told.maker.begin(told.paging.trie, seq, 2 * SLICE_BLOCKS + 1)
        while told.maker.work():
            calls.append(1)

    told.paging.begin(prompt(1, 2 * SLICE_BLOCKS + 1), between=between)
    assert len(calls) == 3
    told.check()


def test_nothing_hangs_before_its_load_has_ended() -> None:
    told = Told()

    def between(seq: Any) -> None:
        told.make(seq, 10)
        assert told.paging.held_prefix(prompt(1, 10)) == 0
        assert told.resident() == {}

    told.paging.begin(prompt(1, 10), between=between)
    assert told.paging.held_prefix(prompt(1, 10)) == 10


def test_a_path_that_another_request_hung_first_shares_its_blocks() -> None:
    told = Told()
    tokens = prompt(1, 8)

    def between(seq: Any) -> None:
        told.make(seq, 8)
        told.begin(tokens)

    mine = told.paging.begin(tokens, between=between)
    assert mine is not None
    [other] = told.sequences
    assert mine.logical_blocks.get_real_blocks()[:8].tolist() == other.logical_blocks.get_real_blocks()[:8].tolist()
    told.check()


def test_a_path_of_blocks_that_the_request_has_lost_is_not_used() -> None:
    told = Told()
    tokens = prompt(1, 8)

    def between(seq: Any) -> None:
        told.make(seq, 8)
        told.paging.blocks.free(seq)
        told.begin(prompt(2, 3))  # takes blocks that the request had
        told.paging.blocks.allocate(seq)

    seq = told.paging.begin(tokens, between=between)
    assert told.paging.held_prefix(tokens) == 8
    assert seq is not None
    told.check()


def test_a_path_that_is_not_complete_is_not_used() -> None:
    told = Told()
    tokens = prompt(1, 2 * SLICE_BLOCKS)

    def between(seq: Any) -> None:
        told.maker.begin(told.paging.trie, seq, 2 * SLICE_BLOCKS)
        assert told.maker.work()
        told.maker.end(int(seq.seq_id))
        assert not told.maker.work()

    told.paging.begin(tokens, between=between)
    assert told.paging.held_prefix(tokens) == 2 * SLICE_BLOCKS
    told.check()


def test_a_path_named_under_an_identity_that_has_passed_is_named_anew() -> None:
    plain, ahead = Told(), Told()
    other = CacheIdentity(model="m", revision="2", kv_dtype="float32", block_size_tokens=BLOCK_TOKENS)
    plain.tracker.rebase(other)
    plain.begin(prompt(1, 8))

    def between(seq: Any) -> None:
        ahead.make(seq, 8)
        ahead.tracker.rebase(other)

    ahead.paging.begin(prompt(1, 8), between=between)
    assert ahead.resident() == plain.resident()
    assert CacheTier.HBM in ahead.resident()


def test_a_path_that_can_not_be_fitted_is_counted_and_lmdeploy_does_it(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()

    def between(seq: Any) -> None:
        told.make(seq, 8)
        seq.kvgate_path._last = None  # no number any more

    told.paging.begin(prompt(1, 8), between=between)
    assert told.guard.errors == 1
    assert "failed to fit a path" in caplog.text
    assert told.paging.held_prefix(prompt(1, 8)) == 8


def test_deferred_reports_equal_immediate_ones() -> None:
    plain, late = Told(), Told()
    for told in (plain, late):
        told.begin(prompt(1, 5))
    late.tracker.deferral = Deferral(lambda: 0.0)
    before = late.resident()
    for told in (plain, late):
        told.begin(prompt(2, 20), ahead=20, deferral=told is late)
        told.begin(prompt(2, 20) + prompt(3, 2))
    assert late.paging.held_prefix(prompt(2, 20)) == 20, "the trie itself has it at once"
    assert late.resident() == before
    late.tracker.settle_now()
    assert late.resident() == plain.resident()
    late.check()


def test_naming_a_path_ahead_makes_deferred_reports_first() -> None:
    plain, late = Told(), Told()
    late.tracker.deferral = Deferral(lambda: 0.0)
    for told in (plain, late):
        told.begin(prompt(2, 20), ahead=20, deferral=told is late)
        told.begin(prompt(2, 20) + prompt(3, 2), ahead=22)
    assert late.resident() == plain.resident()


def test_what_hangs_is_told_before_anything_is_evicted_and_what_has_gone_when_the_moment_is_over() -> None:
    now_s = 0.0
    told = Told(40)
    told.tracker.deferral = Deferral(lambda: now_s)
    told.end(told.begin(prompt(1, 10)))
    told.begin(prompt(2, 10), ahead=10, deferral=True)
    assert len(told.resident()[CacheTier.HBM]) == 10
    told.paging.trie.evict(4)
    assert len(told.resident()[CacheTier.HBM]) == 16, "told in full: that ended the moment"
    told.tracker.deferral.begin(0.1)
    told.paging.trie.evict(3)
    assert len(told.resident()[CacheTier.HBM]) == 16
    now_s = 0.2
    told.tracker.settle()
    assert len(told.resident()[CacheTier.HBM]) == 13
    told.check()


def test_a_deferral_is_bounded_however_often_it_is_prolonged() -> None:
    now_s = 0.0
    deferral = Deferral(lambda: now_s)
    assert not deferral
    for step in range(100):
        now_s = step * 0.01
        deferral.begin(0.1)
        assert deferral
        deferral.begin(0.02)
        if now_s >= MOST_S - 0.1:
            break
    now_s = MOST_S
    assert not deferral
    deferral.begin(0.1)
    assert not deferral, "pending reports come first"
    deferral.end()
    deferral.begin(0.1)
    assert deferral
    deferral.end()
    assert not deferral


def test_loads_that_follow_each_other_keep_nothing_from_being_told() -> None:
    now_s = 0.0
    told = Told()
    told.tracker.deferral = Deferral(lambda: now_s)
    chooses = eviction_of(told.paging.trie)
    assert chooses is not None
    chooses.deferral = Deferral(lambda: now_s)
    watchers = told.tracker, chooses
    for watcher in watchers:
        watcher.defer(0.1)
    told.begin(prompt(1, 5))
    for step in range(1, 100):
        now_s = step * 0.02
        for watcher in watchers:
            watcher.defer(0.1)
            watcher.settle()
        if told.resident() and chooses.resident_blocks:
            break
    assert now_s <= MOST_S + 0.02
    assert len(told.resident()[CacheTier.HBM]) == 5


def test_a_moment_in_which_nothing_changed_takes_nothing_from_the_next() -> None:
    now_s = 0.0
    told = Told()
    told.tracker.deferral = Deferral(lambda: now_s)
    told.tracker.defer(0.1)
    now_s = 2 * MOST_S
    told.tracker.defer(0.1)
    told.begin(prompt(1, 5))
    assert not told.resident()


_REQUESTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 12), st.integers(0, 12), st.sampled_from(["", "a"]), st.booleans()),
    max_size=12,
)


@given(_REQUESTS)
def test_any_requests_leave_the_trie_and_the_events_that_they_leave_without_paths(
    requests: list[tuple[int, int, int, str, bool]],
) -> None:
    plain, ahead = Told(60), Told(60)
    for seed, blocks, made, salt, ends in requests:
        tokens = prompt(seed, blocks)
        for told, some in ((plain, None), (ahead, min(made, blocks))):
            if told.paging.free + sum(told.log.resident_blocks().values()) < blocks + 1:
                continue
            between = None if some is None else partial(ahead.make, last_block=some)
            seq = told.paging.begin(tokens, salt=salt, between=between)
            if seq is not None and ends:
                told.paging.end(seq)
        ahead.check()
        assert ahead.shape() == plain.shape()
        assert ahead.batches() == plain.batches()
