"""Pins on LMDeploy's own block trie and over tiers of plain memory: what stays, what goes, and how much may stay."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engines.control.errors import RefusedError
from engines.events.log import EventLog
from engines.lmdeploy.hooks import event_hooks, eviction_hooks, tenant_hooks
from engines.lmdeploy.offload.tiers import EngineTiers
from engines.lmdeploy.patching import install
from engines.lmdeploy.trie.deferral import Deferral
from engines.lmdeploy.trie.events import TrieTracker, forget_cache
from engines.lmdeploy.trie.eviction import eviction_of
from engines.lmdeploy.trie.pins import TriePins
from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.hashing import TOKEN_BYTES, chain_hashes, root_hash, token_bytes
from kvcontrol.core.ids import BlockHash
from kvcontrol.kv_policy import POLICIES, make_policy
from kvcontrol.kv_runtime import BlockRecord
from tests.support.block_trie import BLOCK_TOKENS, Paging, prompt
from tests.support.tiers import Clock, Rig

HBM, DDR, NVME = CacheTier.HBM, CacheTier.DDR, CacheTier.NVME
IDENTITY = CacheIdentity(model="m", revision="1", kv_dtype="float32", block_size_tokens=BLOCK_TOKENS)
POOL = 41
LONGEST = 10 * BLOCK_TOKENS


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    undo = install([*event_hooks(), *eviction_hooks(), *tenant_hooks()])
    yield
    undo()


def keys_of(tokens: list[int], *, salt: str = "") -> list[BlockHash]:
    return chain_hashes(root_hash(IDENTITY, salt=salt), token_bytes(tokens), BLOCK_TOKENS)


def records_of(tokens: list[int]) -> list[BlockRecord]:
    packed, keys = token_bytes(tokens), keys_of(tokens)
    width = BLOCK_TOKENS * TOKEN_BYTES
    parts = [packed[place * width : (place + 1) * width] for place in range(len(keys))]
    return [BlockRecord(*each, tenant="t") for each in zip(keys, [None, *keys], parts, strict=False)]


class Engine:
    """LMDeploy's paging with pins on it, and where wanted tiers below."""

    def __init__(self, rig: Rig | None = None, *, share: float = 0.5) -> None:
        self.paging = Paging(POOL)
        self.log = EventLog(block_size_tokens=BLOCK_TOKENS, clock=lambda: 0.0, on_pending=lambda: None)
        self.tracker = TrieTracker(self.log, IDENTITY)
        self.tracker.watch(self.paging.trie)
        self.clock = Clock()
        self.rig = rig
        self.tiers: EngineTiers | None = None
        if rig is not None:
            self.tiers = EngineTiers(pages_per_block=1, deadline_s=1.0)
            self.tiers.hierarchy = rig.hierarchy
        self.pins = TriePins(self.paging.scheduler, self.tiers, share=share, longest_tokens=LONGEST, clock=self.clock)
        self.tracker.witness = self.pins
        if self.tiers is not None:
            self.tiers.announcer.witness = self.pins

    def flood(self, blocks: int = 10 * POOL) -> None:
        for seed in range(blocks // 8):
            self.paging.serve(prompt(1_000 + seed, 8))

    def save(self, tokens: list[int]) -> None:
        assert self.rig is not None
        self.rig.save(records_of(tokens))
        self.rig.run()
        self.pins.changed_below(self.rig.changes)
        self.rig.changes.clear()

    def announced(self) -> set[BlockHash]:
        _, resident = self.log.snapshot()
        return {key for key, _ in resident.tiers.get(HBM, ())}

    def check(self) -> None:
        eviction = eviction_of(self.paging.trie)
        assert eviction is not None
        eviction.check_integrity(self.paging.trie)
        self.pins.check_integrity()
        assert not self.tracker.errors


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.check()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(ddr=16, nvme=32, hbm=64)
    yield made
    made.hierarchy.check_integrity()
    made.close()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_pinned_prefix_outlives_ten_pools_of_others_under_every_policy(engine: Engine, policy: str) -> None:
    kept, control = prompt(1, 6), prompt(2, 6)
    engine.paging.serve(kept)
    engine.paging.serve(control)
    engine.pins.pin(keys_of(kept), None)
    eviction = eviction_of(engine.paging.trie)
    assert eviction is not None
    eviction.swap(make_policy(policy, capacity_blocks=POOL))
    engine.flood()
    assert engine.paging.serve(kept) == 6 * BLOCK_TOKENS
    assert engine.paging.serve(control) == 0


def test_pins_hold_where_lmdeploys_own_eviction_has_taken_over() -> None:
    engine = Engine()
    engine.paging.serve(prompt(1, 6))
    engine.pins.pin(keys_of(prompt(1, 6)), None)
    eviction = eviction_of(engine.paging.trie)
    assert eviction is not None
    eviction.errors = 1
    engine.flood()
    assert engine.paging.serve(prompt(1, 6)) == 6 * BLOCK_TOKENS


def test_they_survive_a_swap_of_the_policy_and_go_once_unpinned(engine: Engine) -> None:
    engine.paging.serve(prompt(1, 6))
    engine.pins.pin(keys_of(prompt(1, 6)), None)
    eviction = eviction_of(engine.paging.trie)
    assert eviction is not None
    for name in ("s3fifo", "lru"):
        eviction.swap(make_policy(name, capacity_blocks=POOL))
        engine.flood(POOL)
        assert engine.paging.held_prefix(prompt(1, 6)) == 6
    assert engine.pins.unpin(keys_of(prompt(1, 6))[-1])
    assert not engine.pins.unpin(keys_of(prompt(1, 6))[-1])
    engine.flood()
    assert engine.paging.held_prefix(prompt(1, 6)) == 0


def test_what_is_pinned_before_it_is_computed_stays_once_it_is(engine: Engine) -> None:
    engine.pins.pin(keys_of(prompt(1, 6)), None)
    [pin] = engine.pins.report().pins
    assert (pin.blocks, pin.missing, pin.tiers) == (6, 6, {})
    engine.paging.serve(prompt(1, 6))
    engine.flood()
    assert engine.paging.held_prefix(prompt(1, 6)) == 6
    [pin] = engine.pins.report().pins
    assert (pin.tokens, pin.missing, pin.tiers) == (6 * BLOCK_TOKENS, 0, {HBM: 6})
    assert engine.pins.counts() == {HBM: 6}


def test_the_last_block_alone_names_all_that_comes_before_it(engine: Engine) -> None:
    engine.paging.serve(prompt(1, 6))
    engine.pins.pin(keys_of(prompt(1, 6))[-1:], None)
    assert [pin.blocks for pin in engine.pins.report().pins] == [6]


def test_pins_share_what_they_have_in_common_and_another_salt_is_another_prefix(engine: Engine) -> None:
    short, long = prompt(1, 6)[: 3 * BLOCK_TOKENS + 1], prompt(1, 6)
    engine.paging.serve(long, salt="a")
    engine.pins.pin(keys_of(short, salt="a"), None)
    engine.pins.pin(keys_of(long, salt="a"), None)
    engine.pins.pin(keys_of(long, salt="a"), None)
    engine.pins.pin(keys_of(long, salt="b"), None)
    assert sorted((pin.blocks, pin.missing) for pin in engine.pins.report().pins) == [(3, 0), (6, 0), (6, 6)]
    assert engine.pins.report().pinned_blocks == 12
    engine.pins.unpin(keys_of(long, salt="a")[-1])
    assert engine.pins.counts() == {HBM: 3}
    engine.check()


def test_a_pin_ends_with_its_time_and_a_new_time_counts_from_when_it_is_given(engine: Engine) -> None:
    keys = keys_of(prompt(1, 6))
    engine.paging.serve(prompt(1, 6))
    engine.pins.pin(keys, 10.0)
    engine.clock.pass_by(6)
    engine.pins.pin(keys, 10.0)
    engine.clock.pass_by(6)
    engine.pins.work()
    assert [pin.left_s for pin in engine.pins.report().pins] == [4.0]
    engine.clock.pass_by(4)
    engine.pins.work()
    assert engine.pins.report().pins == []
    assert engine.pins.counts() == {HBM: 0}


def test_more_than_the_share_of_a_tier_is_refused_with_the_limit_and_changes_nothing(engine: Engine, rig: Rig) -> None:
    engine.pins.pin(keys_of(prompt(1, 12)), None)
    with pytest.raises(
        RefusedError, match=r"24 would be pinned.*at most 20 may be \(KVGATE_ENGINE_PIN_SHARE=0.5 of the 41"
    ):
        engine.pins.pin(keys_of(prompt(2, 12)), None)
    assert len(engine.pins.report().pins) == 1
    with pytest.raises(RefusedError, match=r"at most 8 may be .* of the 16 blocks of DDR"):
        Engine(rig).pins.pin(keys_of(prompt(1, 9)), None)


def test_the_longest_request_always_finds_room_beside_pins() -> None:
    engine = Engine(share=1.0)
    with pytest.raises(RefusedError, match=r"at most 30 may be \(the longest request takes 10 of the 41 blocks of HBM"):
        engine.pins.pin(keys_of(prompt(1, 31)), None)
    engine.paging.serve(prompt(1, 30))
    engine.pins.pin(keys_of(prompt(1, 30)), None)
    assert engine.paging.begin(prompt(2, 10)[:LONGEST]) is not None


def test_a_model_with_recurrent_state_has_no_pins() -> None:
    trie = SimpleNamespace(_use_checkpoints=True, block_size=4)
    pins = TriePins(SimpleNamespace(block_trie=trie), None, share=0.5, longest_tokens=4)
    with pytest.raises(RefusedError, match="recurrent state"):
        pins.pin(keys_of(prompt(1, 1)), None)


def test_an_invalidated_prefix_is_gone_with_all_that_follows_it_and_with_its_pins(engine: Engine) -> None:
    head = prompt(1, 6)[: 2 * BLOCK_TOKENS]
    first, second, other = [*head, *prompt(2, 3)], [*head, *prompt(3, 3)], prompt(4, 3)
    for tokens in (first, second, other):
        engine.paging.serve(tokens)
    engine.pins.pin(keys_of(first), None)
    engine.pins.pin(keys_of(other), None)
    done = engine.pins.invalidate(keys_of(head))
    assert (done.dropped, done.in_use_blocks) == ({HBM: 8}, 0)
    assert done.unpinned == [keys_of(first)[-1].hex()]
    assert engine.announced() == set(keys_of(other))
    assert engine.paging.serve(first) == engine.paging.serve(prompt(2, 3)) == 0
    assert engine.pins.invalidate(keys_of(prompt(9, 3))).dropped == {HBM: 0}


def test_of_a_hash_alone_what_comes_before_it_stays(engine: Engine) -> None:
    engine.paging.serve(prompt(1, 6))
    assert engine.pins.invalidate(keys_of(prompt(1, 6))[4:5]).dropped == {HBM: 2}
    assert engine.paging.held_prefix(prompt(1, 6)) == 4


def test_what_a_request_uses_is_left_and_goes_when_it_has_ended(engine: Engine) -> None:
    tokens = prompt(1, 6)
    running = engine.paging.begin(tokens)
    engine.paging.serve([*tokens[:-1], *prompt(2, 2)])
    done = engine.pins.invalidate(keys_of(tokens)[1:])
    assert (done.dropped, done.in_use_blocks) == ({HBM: 2}, 5)
    engine.pins.work()
    assert engine.paging.held_prefix(tokens) == 6
    engine.paging.end(running)
    engine.pins.work()
    assert engine.paging.held_prefix(tokens) == 1
    engine.check()


def test_a_prefix_that_is_pinned_after_it_was_to_be_forgotten_stays(engine: Engine) -> None:
    running = engine.paging.begin(prompt(1, 6))
    engine.pins.invalidate(keys_of(prompt(1, 6)))
    engine.pins.pin(keys_of(prompt(1, 6)), None)
    engine.paging.end(running)
    engine.pins.work()
    engine.flood()
    assert engine.paging.held_prefix(prompt(1, 6)) == 6


def test_a_reset_empties_what_is_pinned_and_the_pins_stand(engine: Engine) -> None:
    engine.paging.serve(prompt(1, 6))
    engine.pins.pin(keys_of(prompt(1, 6)), None)
    assert engine.pins.reset() == {HBM: 6}
    assert engine.announced() == set()
    engine.paging.serve(prompt(1, 6))
    engine.flood()
    assert engine.paging.held_prefix(prompt(1, 6)) == 6


def test_after_new_weights_nothing_is_pinned(engine: Engine) -> None:
    engine.paging.serve(prompt(1, 6))
    engine.pins.pin(keys_of(prompt(1, 6)), None)
    engine.pins.clear()
    assert engine.pins.report().pins == []
    engine.flood()
    assert engine.paging.held_prefix(prompt(1, 6)) == 0


def test_tiers_below_keep_what_is_pinned_whether_it_was_there_or_comes_later(rig: Rig) -> None:
    engine = Engine(rig)
    there, later = prompt(1, 4), prompt(2, 4)
    engine.save(there)
    engine.pins.pin(keys_of(there), None)
    engine.pins.pin(keys_of(later), None)
    engine.save(later)
    for seed in range(20):
        engine.save(prompt(100 + seed, 8))
    for tokens in (there, later):
        for key in keys_of(tokens):
            block_id = rig.hierarchy.find(key)
            assert block_id is not None
            assert DDR in rig.hierarchy.locate(block_id)
    assert engine.pins.counts()[DDR] == 8
    for tokens in (there, later):
        assert engine.pins.unpin(keys_of(tokens)[-1])
    assert not rig.hierarchy.held()
    engine.check()


def test_a_pinned_block_that_is_forgotten_below_and_saved_again_is_held_again(rig: Rig) -> None:
    engine = Engine(rig)
    engine.save(prompt(1, 4))
    engine.pins.pin(keys_of(prompt(1, 4)), None)
    assert engine.pins.reset()[DDR] == 4
    assert not rig.hierarchy.held()
    engine.save(prompt(1, 4))
    assert len(rig.hierarchy.held()) == 4
    engine.check()


def test_an_invalidated_prefix_is_gone_from_all_tiers_with_all_that_follows_it(rig: Rig) -> None:
    engine = Engine(rig)
    tokens = prompt(1, 6)
    engine.save(tokens)
    engine.save(prompt(2, 2))
    running: Any = engine.paging.begin(tokens)
    done = engine.pins.invalidate(keys_of(tokens)[2:3])
    assert (done.dropped[DDR], done.in_use_blocks) == (4, 4)
    assert [rig.hierarchy.find(key) is not None for key in keys_of(tokens)] == [True, True, False, False, False, False]
    engine.save(tokens)  # what the request saves at its end
    engine.paging.end(running)
    engine.pins.work()
    assert [rig.hierarchy.find(key) is not None for key in keys_of(tokens)] == [True, True, False, False, False, False]
    assert all(rig.hierarchy.find(key) is not None for key in keys_of(prompt(2, 2)))
    engine.check()


def late(engine: Engine) -> None:
    """Have everybody who watches the trie told later, of all that comes from now on."""
    eviction = eviction_of(engine.paging.trie)
    assert eviction is not None
    for watcher in (engine.tracker, eviction):
        watcher.deferral = Deferral(lambda: 0.0)
        watcher.defer(0.1)


def test_what_is_to_be_forgotten_is_found_though_nobody_was_told_of_it_yet(engine: Engine) -> None:
    late(engine)
    engine.paging.serve(prompt(1, 6))
    outcome = engine.pins.invalidate(keys_of(prompt(1, 6))[:1])
    assert outcome.dropped[HBM] == 6
    assert engine.paging.held_prefix(prompt(1, 6)) == 0


def test_what_comes_before_a_pin_is_found_though_nobody_was_told_of_it_yet(engine: Engine) -> None:
    late(engine)
    engine.paging.serve(prompt(1, 6))
    engine.pins.pin(keys_of(prompt(1, 6))[-1:], None)
    assert engine.pins.report().pinned_blocks == 6


def test_a_pin_takes_no_hold_of_what_is_about_to_be_forgotten(engine: Engine) -> None:
    engine.pins.pin(keys_of(prompt(1, 6)), None)
    late(engine)
    engine.paging.serve(prompt(1, 6))
    assert engine.pins.reset() == {HBM: 6}
    late(engine)
    engine.paging.serve(prompt(1, 6))
    engine.pins.let_go()  # as an engine that sleeps
    forget_cache(SimpleNamespace(scheduler=engine.paging.scheduler))
    assert engine.paging.held_prefix(prompt(1, 6)) == 0
