"""The hierarchy under anything that may happen, in any order: nothing is lost, nothing is wrong, everything ends."""

import random
from functools import partial

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.core.watermarks import Watermarks
from kvcontrol.core.write_mode import WriteMode
from kvcontrol.kv_policy import POLICIES, make_policy
from kvcontrol.kv_runtime import (
    BlockRecord,
    BlockStatus,
    Finished,
    LaneName,
    Loss,
    SaveRequest,
    TenantQuota,
    TicketId,
    TicketKind,
)
from kvcontrol.kv_runtime.exchange import Lent
from kvcontrol.kv_runtime.resident import Copy
from tests.support.examples import examples
from tests.support.memory_tier import MemoryDisk, MemoryTier
from tests.support.tiers import BLOCK_BYTES, Rig, config_of, record

HBM, DDR, NVME = 40, 6, 10
NAMES = 24
TENANTS = ("ann", "ben", "cyd")

picks = st.integers(0, 10_000)
few = st.lists(picks, min_size=1, max_size=9)
broken = st.sampled_from([BlockStatus.FAILED, BlockStatus.CORRUPT, BlockStatus.NO_SPACE])


def _records(name: int) -> list[BlockRecord]:
    """Return the path to a block; names are a binary tree in which a tenant owns each branch below the root's."""
    names = []
    while name:
        names.append(name)
        name //= 2
    names.reverse()
    return [
        record(one, parent=None if one == 1 else one // 2, tenant=TENANTS[one % 3] if one < 4 else TENANTS[name % 3])
        for one in names
    ]


class Hierarchy(RuleBasedStateMachine):
    @initialize(mode=st.sampled_from(list(WriteMode)), seed=picks, tight=st.booleans())
    def start(self, mode: WriteMode, seed: int, tight: bool) -> None:  # noqa: FBT001
        self.rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
        marks = Watermarks(high=0.7, low=0.5) if tight or mode is WriteMode.BACK else Watermarks()
        self.config = config_of(write_mode=mode, ddr=marks, retry_writes_after_s=1.0)
        self.disk = MemoryDisk(capacity_blocks=NVME, block_bytes=BLOCK_BYTES)
        self.begin()

    def begin(self) -> None:
        self.rig = Rig(self.config, hbm=HBM, ddr=DDR, disk=self.disk)
        self.saved: dict[BlockId, bytes] = {}
        self.free = list(range(HBM))
        self.lent: dict[TicketId, list[int]] = {}
        self.wanted: dict[TicketId, list[BlockId]] = {}
        self.reused: dict[int, bytes] = {}
        self.held: list[BlockId] = []
        self.tickets: list[TicketId] = []
        self.seen: set[TicketId] = set()
        self.peers: list[list[Lent]] = []
        self.watch_reservations()

    def watch_reservations(self) -> None:
        """See that nothing is evicted for what is then refused, but for what is beyond a burst that has shrunk."""
        residency, quotas = self.rig.hierarchy._residency, self.rig.quotas
        reserve = residency.reserve

        def evicted(tier: CacheTier) -> int:
            return residency.losses[tier, Loss.EVICTED] + residency.losses[tier, Loss.EVICTED_LAST]

        def watched(tier: CacheTier, tenant: str, blocks: int) -> list[Copy]:
            before, beyond = evicted(tier), dict(quotas.over_burst(tier)).get(tenant, 0)
            slots = reserve(tier, tenant, blocks)
            assert evicted(tier) - before <= len(slots) + beyond
            return slots

        residency.reserve = watched  # type: ignore[method-assign]

    # What the engine does.

    @rule(name=st.integers(1, NAMES))
    def save(self, name: int) -> None:
        records = _records(name)
        if len(records) > len(self.free):
            return
        slots = [self.free.pop() for _ in records]
        data = self.rig.fill(slots)
        known = {one.key for one in records if self.rig.hierarchy.find(one.key) is not None}
        ticket = self.rig.hierarchy.save([SaveRequest(*pair) for pair in zip(records, slots, strict=True)])
        self.track(ticket.ticket_id, slots)
        for one, block_id, written in zip(records, ticket.block_ids, data, strict=True):
            if block_id is not None and one.key not in known:
                self.saved.setdefault(block_id, written)

    @rule(chosen=few)
    def load(self, chosen: list[int]) -> None:
        ids = self.choose(chosen)[: len(self.free)]
        if not ids:
            return
        slots = [self.free.pop() for _ in ids]
        ticket = self.rig.hierarchy.load(ids, slots, deadline_s=5.0)
        self.wanted[ticket] = ids
        self.track(ticket, slots)

    @rule(chosen=few)
    def prefetch(self, chosen: list[int]) -> None:
        ids = list(dict.fromkeys(self.choose(chosen)))
        self.track(self.rig.hierarchy.prefetch(ids, deadline_s=5.0), [])

    @rule(chosen=few)
    def demote(self, chosen: list[int]) -> None:
        self.track(self.rig.hierarchy.demote(list(dict.fromkeys(self.choose(chosen)))), [])

    @rule(chosen=few)
    def hold(self, chosen: list[int]) -> None:
        self.held.extend(self.rig.hierarchy.claims.hold(list(dict.fromkeys(self.choose(chosen)))))

    @precondition(lambda self: self.held)
    @rule(chosen=picks)
    def release(self, chosen: int) -> None:
        self.rig.hierarchy.claims.release([self.held.pop(chosen % len(self.held))])

    @rule(name=st.integers(1, NAMES))
    def lend(self, name: int) -> None:
        self.peers.append(self.rig.hierarchy.exchange.lend([one.key for one in _records(name)]))

    @precondition(lambda self: self.peers)
    @rule(chosen=picks)
    def come_back(self, chosen: int) -> None:
        self.rig.hierarchy.exchange.back(self.peers.pop(chosen % len(self.peers)))

    @rule(chosen=few)
    def drop(self, chosen: list[int]) -> None:
        ids = self.choose(chosen)
        self.rig.hierarchy.drop(ids)
        assert all(self.rig.hierarchy.locate(block_id) == () for block_id in ids)

    @rule(chosen=picks)
    def cancel(self, chosen: int) -> None:
        if self.tickets:
            self.rig.hierarchy.cancel(self.tickets[chosen % len(self.tickets)])

    @rule()
    def poll(self) -> None:
        self.rig.poll()
        for ticket_id in self.rig.finished.keys() - self.seen:
            self.end(self.rig.finished[ticket_id])

    @rule(seconds=st.sampled_from([0.1, 3.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.clock.pass_by(seconds)

    # What devices do.

    @rule(name=st.integers(NAMES // 2, NAMES))
    def save_to_the_end(self, name: int) -> None:
        self.save(name)
        self.everything_ends()

    @rule(chosen=few)
    def load_to_the_end(self, chosen: list[int]) -> None:
        self.load(chosen)
        self.everything_ends()

    @rule()
    def everything_ends(self) -> None:
        self.rig.run()
        self.poll()

    @rule(lane=st.sampled_from(list(LaneName)))
    def work(self, lane: LaneName) -> None:
        self.rig.stepped.run_one(lane)

    @rule(lane=st.sampled_from(list(LaneName)), chosen=few, what=st.sampled_from(["cancel", "drop", "late", "load"]))
    def something_happens_during_work(self, lane: LaneName, chosen: list[int], what: str) -> None:
        def act() -> None:
            match what:
                case "cancel":
                    for ticket in [ticket for ticket in self.tickets if ticket not in self.seen][: chosen[0] % 4]:
                        self.rig.hierarchy.cancel(ticket)
                case "drop":
                    self.drop(chosen)
                case "late":
                    self.time_passes(40.0)
                case _:
                    self.load(chosen)
            self.poll()

        backend: MemoryTier = self.rig.engine if CacheTier.HBM.lower() in lane else self.disk
        backend.during = act
        self.rig.stepped.run_one(lane)
        backend.during = None

    @rule(faults=st.lists(broken, max_size=4))
    def the_disk_fails(self, faults: list[BlockStatus]) -> None:
        self.disk.fail_reads = list(faults)
        self.disk.fail_writes = list(faults)

    @rule(faults=st.lists(st.just(BlockStatus.FAILED), max_size=2))
    def the_engine_fails(self, faults: list[BlockStatus]) -> None:
        self.rig.engine.fail_reads = list(faults)
        self.rig.engine.fail_writes = list(faults)

    @precondition(lambda self: self.disk.contents)
    @rule(chosen=picks)
    def a_bit_flips_on_disk(self, chosen: int) -> None:
        self.disk.flip(sorted(self.disk.contents)[chosen % len(self.disk.contents)])

    @rule(slot=st.integers(0, DDR - 1))
    def a_bit_flips_in_memory(self, slot: int) -> None:
        """Flip a bit of a block that lies there. What passes through from disk is compared when it is read, and only
        then.
        """
        batches = [batch for plan in self.rig.hierarchy._migrator._open.values() for batch in plan.values()]
        if any(batch.hop > 0 and slot in {route.host for route in batch.routes} for batch in batches):
            return
        with self.rig.arena.view(slot) as view:
            view[11] ^= 32

    # What operators do.

    @rule(
        tenant=st.sampled_from(TENANTS),
        tier=st.sampled_from([CacheTier.DDR, CacheTier.NVME]),
        guaranteed=st.integers(0, 2),
        burst=st.one_of(st.none(), st.integers(2, 8)),
    )
    def quota(self, tenant: str, tier: CacheTier, guaranteed: int, burst: int | None) -> None:
        quota = TenantQuota(
            guaranteed_bytes=guaranteed * BLOCK_BYTES, burst_bytes=None if burst is None else burst * BLOCK_BYTES
        )
        self.rig.quotas.set(tenant, tier, quota)

    @rule(tier=st.sampled_from([CacheTier.DDR, CacheTier.NVME]), name=st.sampled_from(list(POLICIES)))
    def another_policy(self, tier: CacheTier, name: str) -> None:
        self.rig.poll()
        before = {block_id: self.rig.hierarchy.locate(block_id) for block_id in self.saved}
        capacity = DDR if tier is CacheTier.DDR else NVME
        self.rig.hierarchy.policies.swap(tier, partial(make_policy, name, capacity_blocks=capacity))
        assert {block_id: self.rig.hierarchy.locate(block_id) for block_id in self.saved} == before

    @rule(tier=st.sampled_from([CacheTier.DDR, CacheTier.NVME]), name=st.sampled_from(list(POLICIES)))
    def another_policy_begins(self, tier: CacheTier, name: str) -> None:
        capacity = DDR if tier is CacheTier.DDR else NVME
        self.rig.hierarchy.policies.begin_swap(tier, partial(make_policy, name, capacity_blocks=capacity))

    @rule(tier=st.sampled_from([CacheTier.DDR, CacheTier.NVME]), blocks=st.integers(1, 4))
    def it_is_told_of_some_blocks(self, tier: CacheTier, blocks: int) -> None:
        hierarchy = self.rig.hierarchy
        if hierarchy.policies.is_swapping(tier) and not hierarchy.policies.continue_swap(tier, blocks):
            hierarchy.policies.end_swap(tier)
            assert not hierarchy.policies.is_swapping(tier)

    @precondition(lambda self: len(self.tickets) > 12)
    @rule()
    def the_process_is_killed(self) -> None:
        self.disk = MemoryDisk(
            capacity_blocks=NVME, block_bytes=BLOCK_BYTES, contents=self.disk.contents, seals=self.disk.seals
        )
        # A slot that was evicted and not yet reused is found again too: the same block, saved at another time.
        slots = sorted(self.disk.seals, reverse=True)
        first = {self.disk.seals[slot].record.key: slot for slot in slots}
        bytes_of = {key: self.disk.as_sealed(slot) for key, slot in first.items()}
        self.begin()
        found = self.rig.hierarchy.recover()
        assert {one.key: one for _, one in found} == {key: self.disk.seals[slot].record for key, slot in first.items()}
        for block_id, one in found:
            assert self.rig.hierarchy.find(one.key) == block_id
            self.saved[block_id] = bytes_of[one.key]

    # What must hold.

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.hierarchy.check_integrity()
        stats = self.rig.hierarchy.stats()
        for tier in stats.tiers.values():
            assert tier.free_blocks + tier.used_blocks + tier.held_blocks == tier.capacity_blocks
            assert min(tier.free_blocks, tier.used_blocks, tier.held_blocks) >= 0
        assert stats.worker_faults == 0
        assert not self.rig.engine.overlaps
        assert not self.disk.overlaps
        for slot in self.free:  # nobody writes into memory that was given back
            assert slot not in self.reused or self.rig.engine.contents[slot] == self.reused[slot]

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.the_disk_fails([])
        self.the_engine_fails([])
        for lent in self.peers:
            self.rig.hierarchy.exchange.back(lent)
        for _ in range(3):
            self.rig.run()
        self.poll()
        assert self.rig.hierarchy.stats().open_tickets == 0
        assert set(self.tickets) <= self.rig.finished.keys()
        assert len(self.free) == HBM
        self.rig.hierarchy.drop()
        for block_id in self.held:
            self.rig.hierarchy.claims.release([block_id])
        self.rig.run()
        self.everything_adds_up()
        assert [tier.free_blocks for tier in self.rig.hierarchy.stats().tiers.values()] == [DDR, NVME]
        assert not self.disk.seals or not self.rig.hierarchy.stats().tiers[CacheTier.NVME].held_blocks
        self.rig.close()

    # Bookkeeping.

    def choose(self, chosen: list[int]) -> list[BlockId]:
        """Return blocks, most of which are there."""
        known = list(self.saved)
        there = [block_id for block_id in known if self.rig.hierarchy.locate(block_id)] or known
        pools = [known if place % 5 == 0 else there for place in chosen] if known else []
        return [pool[place // 5 % len(pool)] for pool, place in zip(pools, chosen, strict=False)]

    def track(self, ticket_id: TicketId, slots: list[int]) -> None:
        self.tickets.append(ticket_id)
        self.lent[ticket_id] = slots

    def end(self, finished: Finished) -> None:
        """An engine checks what it got and reuses its slots at once."""
        self.seen.add(finished.ticket_id)
        slots = self.lent.pop(finished.ticket_id)
        if finished.kind is TicketKind.LOAD:
            for block_id, slot, outcome in zip(
                self.wanted.pop(finished.ticket_id), slots, finished.outcomes, strict=True
            ):
                assert outcome.block_id in (block_id, None)
                if outcome.status is BlockStatus.OK:
                    assert self.rig.engine.contents[slot] == self.saved[block_id]
        self.reused.update(zip(slots, self.rig.fill(slots), strict=True))
        self.free.extend(slots)


TestHierarchy = Hierarchy.TestCase
TestHierarchy.settings = settings(
    max_examples=examples(120), stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_load_that_names_a_block_twice_holds_it_until_both_are_through() -> None:
    state = Hierarchy()
    state.start(mode=WriteMode.THROUGH, seed=0, tight=True)
    state.save(name=10)
    state.everything_ends()
    state.save(name=6)
    state.demote(chosen=[0])
    state.lend(name=20)
    state.everything_ends()
    state.save_to_the_end(name=22)
    state.the_engine_fails(faults=[BlockStatus.FAILED, BlockStatus.FAILED])
    state.load_to_the_end(chosen=[0, 90])
    assert len(set(state.choose([94, 312, 0, 152]))) == 3
    state.load_to_the_end(chosen=[94, 312, 0, 152])
    state.teardown()
