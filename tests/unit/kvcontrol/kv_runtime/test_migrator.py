"""What carries blocks: order, bounds, fences, ends."""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_runtime import (
    BatchReport,
    BlockStatus,
    HostArena,
    KVMigrator,
    LaneName,
    MigrationPlan,
    MigratorConfig,
    Move,
    PlanId,
    PlanRefusal,
    Priority,
    Route,
    SteppedCrew,
    ThreadCrew,
    checksum,
)
from tests.support.kv_blocks import get, put
from tests.support.memory_tier import Gate, MemoryDisk, MemoryTier, QueueingTier
from tests.support.processes import eventually
from tests.support.tiers import Clock, record

HBM, DDR, NVME = CacheTier.HBM, CacheTier.DDR, CacheTier.NVME
SLOTS, BYTES, BATCH = 32, 256, 4
_LIMIT_S = 60.0


class Bench:
    """A migrator over memory, with the bytes that every tier holds."""

    def __init__(self, *, threads: bool = False, engine: MemoryTier | None = None, **config: float) -> None:
        self.engine = MemoryTier(HBM, capacity_blocks=SLOTS, block_bytes=BYTES) if engine is None else engine
        self.disk = MemoryDisk(capacity_blocks=SLOTS, block_bytes=BYTES)
        self.arena = HostArena(slots=SLOTS, block_bytes=BYTES)
        self.clock = Clock()
        self.crew = SteppedCrew()
        self.threads = ThreadCrew(helpers=1) if threads else None
        self.migrator = KVMigrator(
            MigratorConfig(
                batch_bytes=BATCH * BYTES,
                engine_batch_bytes=BATCH * BYTES,
                engine_workers=1,
                durable_workers=1,
                **config,
            ),  # type: ignore[arg-type]
            engine=self.engine,
            arena=self.arena,
            durable=self.disk,
            crew=self.threads or self.crew,
            clock=time.monotonic if threads else self.clock,
        )
        self.reports: list[BatchReport] = []
        self.checksums: dict[int, int | None] = {}
        rng = random.Random(1)  # noqa: S311 - reproducible, not secret
        self.data = [rng.randbytes(BYTES) for _ in range(SLOTS)]
        self.engine.contents.update(enumerate(self.data))

    def plan(
        self,
        src: CacheTier,
        dst: CacheTier,
        slots: Sequence[int],
        *,
        priority: Priority = Priority.SAVE,
        **more: object,
    ) -> MigrationPlan:
        """Return a plan whose blocks have the same slot everywhere."""
        routes = tuple(
            Route(BlockId(slot), slot, slot, slot, record(slot), None if src is HBM else self.checksums[slot])
            for slot in slots
        )
        fields: dict[str, object] = {"deadline_s": inf} | more
        return MigrationPlan(src_tier=src, dst_tier=dst, routes=routes, priority=priority, **fields)  # type: ignore[arg-type]

    def start(self, *arguments: object, **more: object) -> PlanId:
        plan_id = self.migrator.migrate(self.plan(*arguments, **more))  # type: ignore[arg-type]
        assert not isinstance(plan_id, PlanRefusal)
        return plan_id

    def poll(self) -> list[BatchReport]:
        reports = self.migrator.poll()
        self.reports.extend(reports)
        return reports

    def statuses(self, plan_id: PlanId) -> list[BlockStatus]:
        """Run until a plan has ended; how its blocks did."""
        until_s = time.monotonic() + _LIMIT_S
        while True:
            assert time.monotonic() < until_s, "a plan without an end"
            if self.threads is None:
                self.crew.run()
            else:
                time.sleep(0.001)
            self.poll()
            if self.migrator.idle:
                break
        mine = sorted((report for report in self.reports if report.plan_id == plan_id), key=lambda report: report.start)
        return [result.status for report in mine for result in report.results]

    def save(self, slots: Sequence[int], *, to_disk: bool = False) -> None:
        """Bring blocks into the arena, and to disk."""
        plan_id = self.start(HBM, DDR, slots)
        assert set(self.statuses(plan_id)) == {BlockStatus.OK}
        for report in self.reports:
            if report.plan_id == plan_id:
                for place, result in enumerate(report.results):
                    self.checksums[slots[report.start + place]] = result.checksum
        if to_disk:
            assert set(self.statuses(self.start(DDR, NVME, slots))) == {BlockStatus.OK}

    def close(self) -> None:
        for tier in (self.engine, self.disk):
            tier.read_gate.open()
            tier.write_gate.open()
        assert self.migrator.close(_LIMIT_S)
        self.arena.close()


Make = Callable[..., Bench]


@pytest.fixture
def make() -> Iterator[Make]:
    benches: list[Bench] = []

    def build(**arguments: object) -> Bench:
        benches.append(Bench(**arguments))  # type: ignore[arg-type]
        return benches[-1]

    yield build
    for bench in benches:
        bench.close()


@pytest.fixture(params=[False, True], ids=["stepped", "threads"])
def bench(request: pytest.FixtureRequest, make: Make) -> Bench:
    return make(threads=request.param)


def test_every_way_brings_the_same_bytes(bench: Bench) -> None:
    slots = range(10)
    bench.save(slots, to_disk=True)
    for slot in slots:
        put(bench.arena, slot, bytes(BYTES))
        bench.engine.contents[slot] = bytes(BYTES)
    assert bench.statuses(bench.start(NVME, DDR, slots)) == [BlockStatus.OK] * 10
    assert [get(bench.arena, slot) for slot in slots] == bench.data[:10]
    assert bench.statuses(bench.start(DDR, HBM, slots)) == [BlockStatus.OK] * 10
    assert [bench.engine.contents[slot] for slot in slots] == bench.data[:10]
    for slot in slots:
        put(bench.arena, slot, bytes(BYTES))
        bench.engine.contents[slot] = bytes(BYTES)
    assert bench.statuses(bench.start(NVME, HBM, slots)) == [BlockStatus.OK] * 10
    assert [bench.engine.contents[slot] for slot in slots] == bench.data[:10]


def test_a_block_that_fails_does_not_fail_the_others(bench: Bench) -> None:
    bench.save(range(6), to_disk=True)
    bench.disk.fail_reads = [BlockStatus.OK, BlockStatus.FAILED]
    bench.disk.flip(4)
    want = [BlockStatus.OK] * 6
    want[1], want[4] = BlockStatus.FAILED, BlockStatus.CORRUPT
    assert bench.statuses(bench.start(NVME, HBM, range(6))) == want


def test_bytes_that_changed_in_the_arena_are_not_served(bench: Bench) -> None:
    bench.save(range(3))
    put(bench.arena, 1, bytes(BYTES))
    assert bench.statuses(bench.start(DDR, HBM, range(3))) == [BlockStatus.OK, BlockStatus.CORRUPT, BlockStatus.OK]


def test_a_demand_load_goes_before_what_waits(make: Make) -> None:
    bench = make()
    bench.save(range(24), to_disk=True)
    bench.disk.log.clear()
    bench.start(NVME, DDR, range(16), priority=Priority.PREFETCH)
    bench.crew.run_one(LaneName.NVME_TO_DDR)
    bench.start(NVME, HBM, range(20, 24), priority=Priority.DEMAND)
    bench.crew.run()
    assert [slots[0] for what, slots in bench.disk.log if what == "read"] == [0, 20, 4, 8, 12]


def test_what_a_request_waits_for_can_be_hurried(make: Make) -> None:
    bench = make()
    bench.save(range(16), to_disk=True)
    bench.disk.log.clear()
    bench.start(NVME, DDR, range(8), priority=Priority.PREFETCH)
    later = bench.start(NVME, DDR, range(8, 16), priority=Priority.PREFETCH)
    bench.migrator.hurry(later, Priority.DEMAND)
    bench.crew.run()
    assert [slots[0] for what, slots in bench.disk.log if what == "read"] == [8, 12, 0, 4]
    assert bench.migrator.stats()[LaneName.NVME_TO_DDR].queued_blocks == 0


def test_the_disk_reads_on_while_the_link_carries(make: Make) -> None:
    bench = make()
    bench.save(range(8), to_disk=True)
    plan_id = bench.start(NVME, HBM, range(8), priority=Priority.DEMAND)
    bench.crew.run_one(LaneName.NVME_TO_DDR)
    assert bench.crew.run_one(LaneName.DDR_TO_HBM)
    assert bench.crew.run_one(LaneName.NVME_TO_DDR)
    assert bench.statuses(plan_id) == [BlockStatus.OK] * 8


def test_queues_are_bounded_and_say_so(make: Make) -> None:
    bench = make(queue_blocks=10)
    bench.start(HBM, DDR, range(8))
    assert bench.migrator.free_slots(HBM, DDR, Priority.SAVE) == 2
    assert bench.migrator.migrate(bench.plan(HBM, DDR, range(10, 13))) is PlanRefusal.QUEUE_FULL
    bench.start(HBM, DDR, range(8, 10))
    assert bench.migrator.free_slots(HBM, DDR, Priority.SAVE) is PlanRefusal.QUEUE_FULL
    assert bench.migrator.free_slots(HBM, DDR, Priority.DEMAND) == 10
    bench.crew.run()
    assert bench.migrator.free_slots(HBM, DDR, Priority.SAVE) == 10


def test_what_waits_past_its_deadline_is_late(make: Make) -> None:
    bench = make()
    plan_id = bench.start(HBM, DDR, range(3), deadline_s=bench.clock.now_s + 1)
    bench.clock.pass_by(2)
    assert bench.statuses(plan_id) == [BlockStatus.LATE] * 3
    assert not bench.engine.log


def test_what_has_not_begun_can_be_called_off(make: Make) -> None:
    bench = make()
    plan_id = bench.start(HBM, DDR, range(8))
    bench.crew.run_one(LaneName.HBM_TO_DDR)
    assert bench.migrator.abandon(plan_id, BlockStatus.CANCELLED) == []
    assert bench.statuses(plan_id) == [BlockStatus.OK] * 4 + [BlockStatus.CANCELLED] * 4
    assert bench.migrator.abandon(plan_id, BlockStatus.CANCELLED) == []
    assert bench.migrator.stats()[LaneName.HBM_TO_DDR].queued_blocks == 0


def test_a_read_under_way_is_loose_and_goes_no_further(make: Make) -> None:
    bench = make()
    bench.save(range(4), to_disk=True)
    writes = len(bench.engine.log)
    loose: list[range] = []
    plan_id = bench.start(NVME, HBM, range(4), priority=Priority.DEMAND)
    bench.disk.during = lambda: loose.extend(bench.migrator.abandon(plan_id, BlockStatus.LATE))
    assert bench.statuses(plan_id) == [BlockStatus.LATE] * 4
    assert loose == [range(4)]
    assert len(bench.engine.log) == writes
    assert all(result.arrived for result in bench.reports[-1].results)


def test_a_write_into_engine_memory_is_never_loose(make: Make) -> None:
    bench = make()
    bench.save(range(4))
    loose: list[range] = []
    plan_id = bench.start(DDR, HBM, range(4), priority=Priority.DEMAND)
    bench.engine.during = lambda: loose.extend(bench.migrator.abandon(plan_id, BlockStatus.CANCELLED))
    assert bench.statuses(plan_id) == [BlockStatus.OK] * 4
    assert loose == []


class Signal:
    """A fence that passes when it is told to."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.gate.shut()
        self.passed = False

    def wait(self, timeout_s: float) -> bool:
        time.sleep(min(timeout_s, 0.001))
        return self.passed


def test_engine_memory_is_touched_after_its_fence_and_others_go_first(bench: Bench) -> None:
    fence = Signal()
    waiting = bench.start(HBM, DDR, range(4), fence=fence)
    other = bench.start(HBM, DDR, range(8, 12))
    until_s = time.monotonic() + _LIMIT_S
    while not any(report.plan_id == other for report in bench.reports):
        assert time.monotonic() < until_s
        bench.crew.run_one(LaneName.HBM_TO_DDR)
        bench.poll()
    assert [slots for what, slots in bench.engine.log if what == "read"] == [(8, 9, 10, 11)]
    fence.passed = True
    assert bench.statuses(waiting) == [BlockStatus.OK] * 4


def test_a_fence_that_never_passes_ends_with_the_deadline(make: Make) -> None:
    bench = make()
    plan_id = bench.start(HBM, DDR, range(4), fence=Signal(), deadline_s=bench.clock.now_s + 5)
    for _ in range(3):
        bench.crew.run_one(LaneName.HBM_TO_DDR)
    assert bench.poll() == []
    bench.clock.pass_by(6)
    assert bench.statuses(plan_id) == [BlockStatus.LATE] * 4
    assert not bench.engine.log


class Rude(MemoryTier):
    """Breaks the contract of backends: it raises."""

    error: BaseException | None = None

    def read(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return super().read(moves, arena)


def test_a_backend_that_raises_fails_its_batch_and_nothing_else(make: Make) -> None:
    for threads in (False, True):
        engine = Rude(HBM, capacity_blocks=SLOTS, block_bytes=BYTES)
        bench = make(engine=engine, threads=threads)
        engine.error = RuntimeError("a bug")
        assert bench.statuses(bench.start(HBM, DDR, range(2))) == [BlockStatus.FAILED] * 2
        assert bench.statuses(bench.start(HBM, DDR, range(2))) == [BlockStatus.OK] * 2
        assert (bench.threads or bench.crew).faults == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread's death is the test
def test_a_thread_that_dies_is_replaced_and_counted(make: Make) -> None:
    engine = Rude(HBM, capacity_blocks=SLOTS, block_bytes=BYTES)
    bench = make(engine=engine, threads=True)
    engine.error = SystemExit()
    before = [each for each in threading.enumerate() if each.name.startswith("kv-hbm_to_ddr")]
    assert bench.statuses(bench.start(HBM, DDR, range(2))) == [BlockStatus.FAILED] * 2
    assert bench.statuses(bench.start(HBM, DDR, range(2))) == [BlockStatus.OK] * 2
    assert bench.threads is not None
    assert bench.threads.faults == 1
    while all(each.is_alive() for each in before):  # its end would be another test's warning
        time.sleep(0.001)


def test_a_device_that_does_not_answer_takes_nothing_new(make: Make) -> None:
    bench = make(threads=True, stall_after_s=0.5)
    bench.disk.write_gate.shut()
    bench.save(range(4))
    bench.start(DDR, NVME, range(4))
    assert bench.disk.write_gate.wait_for_arrival()
    eventually(
        lambda: bench.migrator.free_slots(DDR, NVME, Priority.DEMOTION) is PlanRefusal.STALLED,
        30,
        "the stall was noticed",
    )
    assert bench.migrator.migrate(bench.plan(DDR, NVME, range(4))) is PlanRefusal.STALLED
    assert bench.migrator.free_slots(NVME, DDR, Priority.DEMAND) == 4096
    assert not bench.migrator.close(0.05)
    bench.disk.write_gate.open()


def test_closing_ends_what_waits(make: Make) -> None:
    bench = make()
    plan_id = bench.start(HBM, DDR, range(3))
    assert bench.migrator.close(1)
    assert bench.statuses(plan_id) == [BlockStatus.CANCELLED] * 3
    assert bench.migrator.migrate(bench.plan(HBM, DDR, range(3))) is PlanRefusal.CLOSED


def test_each_direction_is_measured(make: Make) -> None:
    bench = make(threads=True)
    assert bench.migrator.seconds_for(NVME, HBM, 4) is None
    for _ in range(3):
        bench.save(range(16), to_disk=True)
        bench.statuses(bench.start(NVME, HBM, range(16)))
    for stats in bench.migrator.stats().values():
        assert stats.bandwidth_bytes_per_s is not None
        assert stats.bandwidth_bytes_per_s > 0
        assert (stats.moved_blocks, stats.moved_bytes, stats.failed_blocks) == (48, 48 * BYTES, 0)
    seconds = bench.migrator.seconds_for(NVME, HBM, 4)
    assert seconds is not None
    assert seconds > 0


def test_plans_that_cannot_be_are_errors(make: Make) -> None:
    bench = make()
    with pytest.raises(ValueError, match="at least one"):
        bench.migrator.migrate(bench.plan(HBM, DDR, []))
    with pytest.raises(KeyError, match="no path from HBM to NVME"):
        bench.migrator.migrate(bench.plan(HBM, NVME, [1]))
    with pytest.raises(ValueError, match="batch_bytes"):
        MigratorConfig(batch_bytes=0)


def test_the_switch_interval_is_the_crews_until_it_closes() -> None:
    before = sys.getswitchinterval()
    crew = ThreadCrew(helpers=2, switch_interval_s=0.0007)
    crew.start({}, lambda _lane, _wait_s: False)
    assert sys.getswitchinterval() == pytest.approx(0.0007)
    assert crew.close(1)
    assert crew.close(1)
    assert sys.getswitchinterval() == pytest.approx(before)


def test_large_batches_are_shared_among_helpers_and_come_back_in_order() -> None:
    large = 300_000
    engine = MemoryTier(HBM, capacity_blocks=16, block_bytes=large)
    rng = random.Random(8)  # noqa: S311 - reproducible, not secret
    engine.contents.update({slot: rng.randbytes(large) for slot in range(16)})
    arena = HostArena(slots=16, block_bytes=large)
    crew = ThreadCrew(helpers=3)
    migrator = KVMigrator(MigratorConfig(), engine=engine, arena=arena, durable=None, crew=crew)
    routes = tuple(Route(BlockId(slot), slot, slot, slot, record(slot), None) for slot in range(16))
    plan = MigrationPlan(src_tier=HBM, dst_tier=DDR, routes=routes, priority=Priority.SAVE, deadline_s=inf)
    assert not isinstance(migrator.migrate(plan), PlanRefusal)
    until_s = time.monotonic() + _LIMIT_S
    reports: list[BatchReport] = []
    while not migrator.idle or not reports:
        assert time.monotonic() < until_s
        time.sleep(0.001)
        reports.extend(migrator.poll())
    sums = [result.checksum for report in reports for result in report.results]
    assert sums == [checksum(engine.contents[slot]) for slot in range(16)]
    assert migrator.close(_LIMIT_S)
    arena.close()


@pytest.mark.parametrize("hosts", [range(4), range(3), [0, 1, 3, 2]])
@pytest.mark.parametrize("broken", [None, 2])
def test_a_load_that_was_checked_ahead_is_checked_all_the_same(hosts: Sequence[int], broken: int | None) -> None:
    large = 300_000
    engine = MemoryTier(HBM, capacity_blocks=4, block_bytes=large)
    arena = HostArena(slots=4, block_bytes=large)
    rng = random.Random(9)  # noqa: S311 - reproducible, not secret
    data = [rng.randbytes(large) for _ in range(4)]
    for slot in range(4):
        put(arena, slot, data[slot])
    sums = [checksum(each) for each in data]
    if broken is not None:
        put(arena, broken, bytes(large))
    computed: list[int] = []

    def watched(arena: HostArena, slots: Sequence[int]) -> list[int]:
        computed.extend(slots)
        return [checksum(arena.view(slot)) for slot in slots]

    crew = ThreadCrew(helpers=2)
    config = MigratorConfig(check_ahead_bytes=1)
    migrator = KVMigrator(config, engine=engine, arena=arena, durable=None, crew=crew, checksums=watched)
    migrator.check_ahead(list(hosts))
    routes = tuple(Route(BlockId(slot), slot, slot, slot, record(slot), sums[slot]) for slot in range(4))
    plan = MigrationPlan(src_tier=DDR, dst_tier=HBM, routes=routes, priority=Priority.DEMAND, deadline_s=inf)
    assert not isinstance(migrator.migrate(plan), PlanRefusal)
    reports: list[BatchReport] = []

    def ended() -> bool:
        reports.extend(migrator.poll())
        return migrator.idle

    eventually(ended, _LIMIT_S, "the load never ended")
    statuses = [result.status for report in reports for result in report.results]
    assert statuses == [BlockStatus.CORRUPT if slot == broken else BlockStatus.OK for slot in range(4)]
    assert set(computed) == set(range(4))
    assert migrator.close(_LIMIT_S)
    arena.close()


@pytest.fixture
def queueing(make: Make) -> Bench:
    return make(
        engine=QueueingTier(capacity_blocks=SLOTS, block_bytes=BYTES), threads=True, load_batch_bytes=BATCH * BYTES
    )


def test_a_load_can_be_counted_on_before_it_is_done(queueing: Bench) -> None:
    queueing.save(range(6))
    queueing.engine.write_gate.shut()
    plan_id = queueing.start(DDR, HBM, range(6), priority=Priority.DEMAND)
    assert queueing.engine.write_gate.wait_for_arrival()
    assert queueing.migrator.reports.wait(_LIMIT_S)
    assert queueing.poll() == []
    assert queueing.migrator.reports.take_queued() == [(plan_id, BATCH)]
    queueing.engine.write_gate.open()
    assert queueing.statuses(plan_id) == [BlockStatus.OK] * 6
    assert queueing.migrator.reports.take_queued() == [(plan_id, 2)]


def test_a_batch_with_a_broken_block_is_not_told_before_its_end(queueing: Bench) -> None:
    queueing.save(range(4))
    with queueing.arena.view(2) as view:
        view[7] ^= 1
    plan_id = queueing.start(DDR, HBM, range(4), priority=Priority.DEMAND)
    ok, corrupt = BlockStatus.OK, BlockStatus.CORRUPT
    assert queueing.statuses(plan_id) == [ok, ok, corrupt, ok]
    assert queueing.migrator.reports.take_queued() == []


def test_a_device_that_refuses_is_not_told_of(queueing: Bench) -> None:
    queueing.save(range(4))
    queueing.engine.refuses = True  # type: ignore[attr-defined]
    queueing.engine.fail_writes += [BlockStatus.FAILED] * 4
    assert queueing.statuses(queueing.start(DDR, HBM, range(4))) == [BlockStatus.FAILED] * 4
    assert queueing.migrator.reports.take_queued() == []


def test_blocks_from_the_durable_tier_can_be_counted_on_too(queueing: Bench) -> None:
    queueing.save(range(3))
    assert queueing.statuses(queueing.start(DDR, NVME, range(3))) == [BlockStatus.OK] * 3
    plan_id = queueing.start(NVME, HBM, range(3), priority=Priority.DEMAND)
    assert queueing.statuses(plan_id) == [BlockStatus.OK] * 3
    assert queueing.migrator.reports.take_queued() == [(plan_id, 3)]
