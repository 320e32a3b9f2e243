"""The log against a naive twin: whatever happens, a subscriber that applies the batches knows what the engine knows."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.events.log import MAX_BATCH_BLOCKS, EventLog, Published
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvcontrol.core.hashing import token_bytes
from kvcontrol.core.ids import BlockHash, Seq
from kvcontrol.core.wire import decode_batch
from tests.support.examples import examples

BLOCK = 2
TIERS = (CacheTier.HBM, CacheTier.DDR)


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def make_log(*, pending: int = 1_000, ring: int = 1_000, woken: list[int] | None = None) -> EventLog:
    return EventLog(
        block_size_tokens=BLOCK,
        clock=lambda: 1.5,
        on_pending=lambda: None if woken is None else woken.append(1),
        max_pending_blocks=pending,
        replay_batches=ring,
    )


class Subscriber:
    """The naive twin: plain sets, one event after the other."""

    def __init__(self) -> None:
        self.tiers: dict[CacheTier, set[BlockHash]] = {}
        self.last = -1

    def apply(self, batches: list[Published]) -> None:
        for batch in batches:
            assert batch.seq == self.last + 1
            self.last = batch.seq
            decoded = decode_batch(batch.payload)
            assert not decoded.undecodable
            for event in decoded.batch.events:
                match event:
                    case BlockStored():
                        self.tiers.setdefault(event.tier, set()).update(event.block_hashes)
                    case BlockRemoved():
                        self.tiers.setdefault(event.tier, set()).difference_update(event.block_hashes)
                    case AllBlocksCleared():
                        self.tiers.clear()

    def held(self) -> dict[CacheTier, set[BlockHash]]:
        return {tier: blocks for tier, blocks in self.tiers.items() if blocks}


class LogMachine(RuleBasedStateMachine):
    """Stores, removals in any order, clears, publishing and snapshots, with a queue of five and a ring of four."""

    def __init__(self) -> None:
        super().__init__()
        self.log = make_log(pending=5, ring=4)
        self.subscriber = Subscriber()
        self.truth: dict[CacheTier, dict[BlockHash, BlockHash | None]] = {tier: {} for tier in TIERS}
        self.published: list[Published] = []
        self.next_name = 0

    def _held(self) -> dict[CacheTier, set[BlockHash]]:
        return {tier: set(blocks) for tier, blocks in self.truth.items() if blocks}

    @rule(data=st.data(), tier=st.sampled_from(TIERS), told=st.booleans())
    def store(self, data: st.DataObject, tier: CacheTier, told: bool) -> None:  # noqa: FBT001
        parent = data.draw(st.sampled_from([None, *self.truth[tier]]))
        known = [block for block, above in self.truth[CacheTier.HBM].items() if above == parent]
        if known and data.draw(st.booleans()):
            block = data.draw(st.sampled_from(known))
        else:
            block = name(self.next_name)
            self.next_name += 1
        tokens = token_bytes([self.next_name, 7]) if told else b""
        self.log.stored(block, parent=parent, tokens=tokens, tier=tier)
        self.truth[tier][block] = parent

    @rule(count=st.integers(0, 7), tier=st.sampled_from(TIERS), told=st.booleans())
    def store_a_path(self, count: int, tier: CacheTier, told: bool) -> None:  # noqa: FBT001
        path = [name(self.next_name + place) for place in range(count)]
        self.next_name += count
        tokens = token_bytes([self.next_name, 7]) if told else b""
        self.log.stored_all(
            [(block, path[place - 1] if place else None, tokens) for place, block in enumerate(path)], tier=tier
        )
        self.truth[tier].update({block: path[place - 1] if place else None for place, block in enumerate(path)})

    @rule(data=st.data(), tier=st.sampled_from(TIERS))
    def remove_several(self, data: st.DataObject, tier: CacheTier) -> None:
        blocks = data.draw(st.lists(st.sampled_from([name(10**6), *self.truth[tier]]), max_size=7))
        self.log.removed_all(blocks, tier=tier)
        for block in blocks:
            self.truth[tier].pop(block, None)

    @rule(data=st.data(), tier=st.sampled_from(TIERS))
    def remove(self, data: st.DataObject, tier: CacheTier) -> None:
        block = data.draw(st.sampled_from([name(10**6), *self.truth[tier]]))
        self.log.removed(block, tier=tier)
        self.truth[tier].pop(block, None)

    @rule()
    def clear(self) -> None:
        self.log.cleared()
        for blocks in self.truth.values():
            blocks.clear()

    @rule()
    def publish(self) -> None:
        batches = self.log.publish()
        self.published += batches
        self.subscriber.apply(batches)
        assert self.subscriber.held() == self._held()
        assert self.log.publish() == []

    @rule()
    def snapshot(self) -> None:
        batches, resident = self.log.snapshot()
        self.published += batches
        self.subscriber.apply(batches)
        assert resident.seq == self.subscriber.last
        assert {tier: {block for block, _ in blocks} for tier, blocks in resident.tiers.items()} == self._held()
        for tier, blocks in resident.tiers.items():
            place = {block: index for index, (block, _) in enumerate(blocks)}
            assert len(place) == len(blocks)
            for block, above in blocks:
                assert above == self.truth[tier][block]
                assert above not in place or place[above] < place[block]

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        first = data.draw(st.integers(0, len(self.published)))
        kept = self.published[-4:]
        assert list(self.log.replay(Seq(first))) == [batch for batch in kept if batch.seq >= first]

    @invariant()
    def counts_what_is_resident(self) -> None:
        counted = {tier: count for tier, count in self.log.resident_blocks().items() if count}
        assert counted == {tier: len(blocks) for tier, blocks in self._held().items()}


TestLogAgainstNaiveTwin = LogMachine.TestCase
TestLogAgainstNaiveTwin.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def test_a_chain_recorded_in_a_row_is_one_event() -> None:
    log = make_log()
    for number in range(4):
        log.stored(name(number), parent=name(number - 1) if number else None, tokens=token_bytes([number, number]))
    [batch] = log.publish()
    [event] = decode_batch(batch.payload).batch.events
    assert event == BlockStored(
        block_hashes=tuple(name(n) for n in range(4)),
        parent=None,
        token_ids=(0, 0, 1, 1, 2, 2, 3, 3),
        block_size_tokens=BLOCK,
    )


def test_two_branches_are_two_events_and_removals_are_joined() -> None:
    log = make_log()
    log.stored(name(1), parent=None)
    log.stored(name(2), parent=name(1))
    log.stored(name(3), parent=name(1))
    log.removed(name(3))
    log.removed(name(2))
    [batch] = log.publish()
    assert decode_batch(batch.payload).batch.events == (
        BlockStored(block_hashes=(name(1), name(2)), parent=None, token_ids=(), block_size_tokens=BLOCK),
        BlockStored(block_hashes=(name(3),), parent=name(1), token_ids=(), block_size_tokens=BLOCK),
        BlockRemoved(block_hashes=(name(3), name(2))),
    )


def test_the_publisher_is_woken_once_for_a_burst() -> None:
    woken: list[int] = []
    log = make_log(woken=woken)
    for number in range(10):
        log.stored(name(number), parent=None)
    assert len(woken) == 1
    log.publish()
    log.removed(name(1))
    assert len(woken) == 2


def test_an_overflow_is_counted_and_the_state_is_told_anew() -> None:
    log = make_log(pending=3)
    subscriber = Subscriber()
    log.stored(name(0), parent=None)
    subscriber.apply(log.publish())
    for number in range(1, 6):
        log.stored(name(number), parent=name(number - 1))
    log.removed(name(5))
    counters = log.counters()
    assert counters.dropped == 6
    [batch] = log.publish()
    events = decode_batch(batch.payload).batch.events
    assert events[0] == AllBlocksCleared()
    subscriber.apply([batch])
    assert subscriber.held() == {CacheTier.HBM: {name(n) for n in range(5)}}
    assert log.counters().resyncs == 1


def test_a_large_state_is_told_in_messages_of_bounded_size() -> None:
    log = make_log(pending=1)
    total = 2 * MAX_BATCH_BLOCKS + 10
    for number in range(total):
        log.stored(name(number), parent=name(number - 1) if number else None)
    batches = log.publish()
    subscriber = Subscriber()
    subscriber.apply(batches)
    assert len(subscriber.tiers[CacheTier.HBM]) == total
    for batch in batches:
        events = decode_batch(batch.payload).batch.events
        assert sum(len(e.block_hashes) for e in events if not isinstance(e, AllBlocksCleared)) <= MAX_BATCH_BLOCKS


def test_tokens_of_another_length_are_refused_and_nothing_is_recorded() -> None:
    log = make_log()
    with pytest.raises(ValueError, match="4 bytes of tokens for a block of 2 tokens"):
        log.stored(name(1), parent=None, tokens=token_bytes([1]))
    assert log.publish() == []
    assert log.resident_blocks() == {}


def test_adapters_are_told_again_after_an_overflow() -> None:
    log = make_log(pending=1)
    log.stored(name(1), parent=None, adapter="sql")
    log.stored(name(2), parent=name(1), adapter="sql")
    [batch] = log.publish()
    cleared, stored = decode_batch(batch.payload).batch.events
    assert cleared == AllBlocksCleared()
    assert isinstance(stored, BlockStored)
    assert stored.adapter == "sql"


def test_of_a_path_with_tokens_of_another_length_nothing_is_recorded() -> None:
    log = make_log()
    with pytest.raises(ValueError, match="bytes of tokens"):
        log.stored_all([(name(1), None, b""), (name(2), name(1), b"12345")], tier=CacheTier.DDR)
    assert log.counters().stored == 0
    assert log.resident_blocks() == {}
    assert log.publish() == []
