"""What is ordered for a request, step by step: a fake sequence over a real hierarchy of plain memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from engines.control.guard import Guard
from engines.lmdeploy.offload.plan import OffloadPlanner, SaveOrder
from kvcontrol.agent import KVAgent
from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.kv_policy import AdaptivePolicy
from tests.support.tiers import Rig

SIZE = 4
IDENTITY = CacheIdentity(model="m", revision="1", kv_dtype="float32", block_size_tokens=SIZE, tp_rank=0, tp_size=1)


@dataclass
class FakeSequence:
    """As much of LMDeploy's sequence as the planner looks at."""

    seq_id: int
    tokens: Sequence[int]
    num_history_ids: int = 0
    salt: str = ""
    adapter_name: str | None = None
    has_picture: bool = False
    history_embeddings: list[object] = field(default_factory=list)

    @property
    def history_cache(self) -> np.ndarray:
        return np.array(self.tokens, dtype=np.int64)

    @property
    def history_multimodals(self) -> SimpleNamespace:
        return SimpleNamespace(empty=lambda: not self.has_picture)

    @property
    def sampling_param(self) -> SimpleNamespace:
        return SimpleNamespace(kvgate_cache_salt=self.salt) if self.salt else SimpleNamespace()

    def get_prefix_cache_max_candidate_step(self) -> int:
        return len(self.tokens) - 1

    def clamp_prefix_cache_match_step(self, step: int) -> int:
        return step // SIZE * SIZE


class World:
    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.agent = KVAgent(rig.hierarchy)
        self.pinned: list[SaveOrder] = []
        self.planner = OffloadPlanner(agent=self.agent, identity=IDENTITY, pin=self.pinned.append, guard=Guard())

    def prefill(self, seq: FakeSequence, upto: int, slots: Sequence[int]) -> list[SaveOrder]:
        """One step that computes a prompt up to a token; returns what is saved of it, saved."""
        _, saves, _ = self.planner.orders([seq], [upto], [slots], [[100 + slot for slot in slots]])
        for order in saves:
            self.rig.end_of(self.rig.hierarchy.save(order.requests).ticket_id)
            assert self.planner.saved(order.save_id)
            assert not self.planner.saved(order.save_id)
        return saves


@pytest.fixture
def world() -> Iterator[World]:
    rig = Rig(ddr=32)
    yield World(rig)
    rig.hierarchy.check_integrity()
    assert not rig.hierarchy.held()
    rig.close()


def test_full_blocks_are_saved_only_once_and_what_comes_before_them_is_held_meanwhile(world: World) -> None:
    seq = FakeSequence(1, range(18))
    [first] = world.prefill(seq, 9, [5, 6, 7])
    assert [request.engine_slot for request in first.requests] == [5, 6]
    assert first.logical_ids == (105, 106)
    assert [request.record.parent for request in first.requests] == [None, first.requests[0].record.key]
    assert world.prefill(seq, 11, [5, 6, 7]) == []
    [second] = world.prefill(seq, 18, [5, 6, 7, 8, 9])
    assert [request.engine_slot for request in second.requests] == [7, 8]
    assert second.logical_ids == (107, 108)
    assert len(second.plan.held) == 2
    again = FakeSequence(2, range(18))
    assert world.prefill(again, 18, [15, 16, 17, 18, 19]) == [], "it is there already"
    assert world.planner.counters.saves == 2


def test_tails_go_before_heads_also_where_the_heads_were_on_their_way_when_the_tails_were_planned() -> None:
    rig = Rig(ddr=8, nvme=0)
    world, seq = World(rig), FakeSequence(1, range(24))
    tickets, keys = [], []
    for upto in (12, 24):
        _, [order], _ = world.planner.orders([seq], [upto], [range(6)], [range(6)])
        assert order.plan.heads_held == (upto == 12)
        ticket = rig.hierarchy.save(order.requests, heads_held=order.plan.heads_held)
        tickets.append((order.save_id, ticket.ticket_id))
        keys += [request.record.key for request in order.requests]
    assert len(keys) == 6
    for save_id, ticket_id in tickets:
        rig.end_of(ticket_id)
        assert world.planner.saved(save_id)
    for other in range(2, 6):
        world.prefill(FakeSequence(other, range(100 * other, 100 * other + 8)), 8, [8, 9])
        there = [place for place, key in enumerate(keys) if rig.hierarchy.find(key) is not None]
        assert there == list(range(len(there))), "what is left is a head"
    rig.hierarchy.check_integrity()
    rig.close()


def test_a_request_that_looks_up_again_what_it_has_computed_itself_is_counted_once(world: World) -> None:
    seq = FakeSequence(1, range(40))
    assert world.planner.external_tokens(seq, 0) == 0
    world.prefill(seq, 40, range(10))
    assert world.planner.external_tokens(seq, 0) == 36  # it was preempted, and its blocks are below
    report = world.agent.metrics.report()
    assert (report.lookups, report.looked_up_tokens, report.hit_tokens) == (1, 36, 0)
    world.planner.forget(1)


def test_a_load_is_planned_bound_to_slots_and_ends(world: World) -> None:
    world.prefill(FakeSequence(1, range(40)), 40, range(10))
    seq = FakeSequence(2, range(40))
    assert world.planner.external_tokens(seq, 8) == 28  # 9 of 10 blocks: the last token is computed
    assert world.planner.external_tokens(seq, 8) == 28
    assert world.agent.metrics.report().lookups == 1, "the plan stays"
    assert world.planner.external_tokens(seq, 16) == 20, "the engine found more itself"
    assert world.planner.allocated(seq, [20, 21, 22])
    [order], saves, tails = world.planner.orders([], [], [], [])
    assert (order.request_id, order.slots, order.plan.first_block, order.plan.last_block) == (2, (20, 21, 22), 4, 7)
    assert saves == tails == []
    assert not world.planner.is_idle
    assert world.planner.loaded(2, success=True)
    world.agent.release(order.plan)
    assert world.planner.is_idle
    assert world.planner.counters.loads == 1


def test_a_request_whose_load_failed_is_not_loaded_for_again(world: World) -> None:
    world.prefill(FakeSequence(1, range(40)), 40, range(10))
    seq = FakeSequence(2, range(40))
    assert world.planner.external_tokens(seq, 0) > 0
    world.planner.allocated(seq, [20])
    [order], _, _ = world.planner.orders([], [], [], [])
    assert not world.planner.loaded(2, success=False)
    world.agent.release(order.plan)
    assert world.planner.external_tokens(seq, 0) == 0
    world.planner.arrived(seq)
    assert world.planner.external_tokens(seq, 0) > 0, "another request under the same id"
    world.planner.forget(2)


def test_a_load_that_can_not_be_bound_counts_as_failed_for_its_request(world: World) -> None:
    world.prefill(FakeSequence(1, range(40)), 40, range(10))
    seq = FakeSequence(2, range(40))
    assert world.planner.external_tokens(seq, 0) > 0
    assert not world.planner.loaded(2, success=False)
    assert world.planner.external_tokens(seq, 0) == 0
    world.planner.forget(2)


def test_an_ended_request_gives_its_tail_pinned_and_forgets_the_rest(world: World) -> None:
    seq = FakeSequence(1, range(30))
    world.prefill(seq, 10, [0, 1, 2])
    seq.num_history_ids = 29
    world.planner.ended(seq, range(8), range(100, 108))
    [order] = world.pinned
    assert order.logical_ids == tuple(range(102, 107))
    _, _, tails = world.planner.orders([], [], [], [])
    assert tails == [order]
    assert world.planner.counters.tail_saves == 1
    assert world.planner.saved(order.save_id)
    assert world.planner.is_idle


def test_a_tail_that_can_not_be_pinned_is_not_under_way(world: World) -> None:
    def broken(_: SaveOrder) -> None:
        raise RuntimeError("no lease")

    world.planner.pin = broken
    with pytest.raises(RuntimeError, match="no lease"):
        world.planner.ended(FakeSequence(1, range(30), num_history_ids=29), range(8), range(8))
    assert world.planner.is_idle
    assert world.planner.orders([], [], [], []) == ([], [], [])


def test_a_request_that_ends_before_its_load_began_leaves_no_hold(world: World) -> None:
    world.prefill(FakeSequence(1, range(40)), 40, range(10))
    seq = FakeSequence(2, range(40))
    assert world.planner.external_tokens(seq, 0) > 0
    world.planner.ended(seq, (), ())
    other = FakeSequence(3, range(40))
    assert world.planner.external_tokens(other, 0) > 0
    world.planner.allocated(other, [20])
    world.planner.reset()
    assert world.planner.is_idle


def test_salts_adapters_and_none_of_them_are_three_different_things(world: World) -> None:
    kinds = [{}, {"salt": "x"}, {"adapter_name": "x"}]
    keys = []
    for place, kind in enumerate(kinds):
        [order] = world.prefill(FakeSequence(place, range(8), **kind), 8, [0, 1])  # type: ignore[arg-type]
        keys.append(order.requests[0].record.key)
    assert len(set(keys)) == 3
    assert len({record.tenant for _, record in world.rig.hierarchy.blocks()}) == 2


def test_pictures_and_embeddings_take_no_part(world: World) -> None:
    world.prefill(FakeSequence(1, range(40)), 40, range(10))
    for seq in (
        FakeSequence(2, range(40), has_picture=True),
        FakeSequence(3, range(40), history_embeddings=[object()]),
    ):
        assert world.planner.external_tokens(seq, 0) == 0
        assert world.prefill(seq, 40, range(10)) == []


def test_other_weights_make_requests_under_way_strangers(world: World) -> None:
    world.prefill(FakeSequence(1, range(40)), 40, range(10))
    seq = FakeSequence(2, range(40))
    assert world.planner.external_tokens(seq, 0) > 0
    world.planner.rebase(
        CacheIdentity(model="m", revision="2", kv_dtype="float32", block_size_tokens=SIZE, tp_rank=0, tp_size=1)
    )
    assert world.planner.external_tokens(seq, 0) == 0
    assert world.prefill(seq, 40, range(10)) == []
    assert not world.planner.loaded(2, success=True)
    newer = FakeSequence(3, range(40))
    assert world.planner.external_tokens(newer, 0) == 0
    assert len(world.prefill(newer, 40, range(10))) == 1


def test_policies_below_that_follow_prompts_are_told_of_each_once_and_of_what_it_finds(world: World) -> None:
    policy = AdaptivePolicy(32)
    world.rig.hierarchy.policies.swap(CacheTier.DDR, lambda: policy)
    world.prefill(FakeSequence(1, range(40)), 40, range(10))
    seq = FakeSequence(2, range(40))
    for _ in range(2):
        assert world.planner.external_tokens(seq, 0) == 36
        assert (policy.state().hits, policy.state().lru_hits) == (36, 36)
    assert world.planner.allocated(seq, range(20, 29))
    [order], _, _ = world.planner.orders([], [], [], [])
    assert world.planner.loaded(2, success=True)
    world.agent.release(order.plan)
