"""What of a prompt is loaded from below HBM: verified block by block, and only where that beats computing."""

from collections.abc import Iterator, Sequence

import pytest

from kvcontrol.agent import PROBE_EVERY_S, KVAgent
from kvcontrol.core.hashing import TOKEN_BYTES, token_bytes
from kvcontrol.core.ids import BlockHash
from kvcontrol.core.tenant import SHARED_TENANT, tenant_of_salt
from kvcontrol.kv_policy import SHORT_PREFILL_TOKENS, PrefillSpeed
from kvcontrol.kv_runtime import BlockRecord
from kvcontrol.prefix_reuse import PromptChain
from tests.support.tiers import Clock, Rig

SIZE = 4
ROOT = BlockHash(b"r" * 16)


def chain_of(tokens: Sequence[int], root: BlockHash = ROOT) -> PromptChain:
    packed = token_bytes(tokens)
    return PromptChain(
        root, block_size_tokens=SIZE, source=lambda first, last: packed[first * TOKEN_BYTES : last * TOKEN_BYTES]
    )


def grown(tokens: Sequence[int], root: BlockHash = ROOT) -> PromptChain:
    chain = chain_of(tokens, root)
    chain.grow(len(tokens) // SIZE)
    return chain


def records(chain: PromptChain) -> list[BlockRecord]:
    return [
        BlockRecord(key=key, parent=chain.parent(place), tokens=chain.tokens(place), tenant="tenant")
        for place, key in enumerate(chain.keys)
    ]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(ddr=32)
    yield rig
    rig.hierarchy.check_integrity()
    rig.close()


def test_a_chain_hashes_each_block_once_and_grows_to_what_hashing_at_once_gives() -> None:
    tokens = list(range(40))
    at_once, asked = grown(tokens), list[tuple[int, int]]()
    packed = token_bytes(tokens)

    def source(first: int, last: int) -> bytes:
        asked.append((first, last))
        return packed[first * TOKEN_BYTES : last * TOKEN_BYTES]

    slowly = PromptChain(ROOT, block_size_tokens=SIZE, source=source)
    for blocks in (2, 2, 1, 7, 10):
        slowly.grow(blocks)
    assert slowly.keys == at_once.keys
    assert asked == [(0, 8), (8, 28), (28, 40)]
    assert [slowly.tokens(place) for place in range(10)] == [
        token_bytes(tokens[place * SIZE : (place + 1) * SIZE]) for place in range(10)
    ]
    assert slowly.parent(0) is None
    assert slowly.parent(3) == slowly.keys[2]
    assert set(grown(tokens, BlockHash(b"s" * 16)).keys).isdisjoint(slowly.keys)


def test_a_tenant_is_named_by_a_digest_and_never_by_its_salt() -> None:
    names = {tenant_of_salt(salt) for salt in ("", "a", "b", "ä" * 30)}
    assert len(names) == 4
    assert SHARED_TENANT in names
    assert tenant_of_salt("a") == tenant_of_salt("a")
    assert all(name == SHARED_TENANT or (len(name) == 16 and int(name, 16) >= 0) for name in names)


def test_the_longest_verified_run_is_planned_and_held_until_it_is_released(rig: Rig) -> None:
    chain, agent = grown(range(40)), KVAgent(rig.hierarchy)
    rig.save(records(chain)[:6])
    plan = agent.plan_load(chain, 2, 9)
    assert plan is not None
    assert (plan.first_block, plan.last_block) == (2, 6)
    assert list(plan.block_ids) == rig.ids(records(chain)[2:6])
    assert agent.shorten(plan, 9) is plan
    short = agent.shorten(plan, 2)
    assert short.last_block == 4
    rig.hierarchy.drop()
    agent.release(short)
    report = agent.metrics.report()
    assert (report.looked_up_tokens, report.hit_tokens, report.collisions) == (7 * SIZE, 4 * SIZE, 0)
    assert agent.plan_load(chain, 0, 9) is None
    assert agent.declined == 0, "what isn't there is no decision against it"


@pytest.mark.parametrize("wrong", ["tokens", "parent"])
def test_an_equal_hash_over_other_content_ends_the_run_and_is_counted(rig: Rig, wrong: str) -> None:
    chain, agent = grown(range(24)), KVAgent(rig.hierarchy)
    saved = records(chain)
    liar = saved[3]
    saved[3] = (
        BlockRecord(key=liar.key, parent=liar.parent, tokens=bytes(len(liar.tokens)), tenant="tenant")
        if wrong == "tokens"
        else BlockRecord(key=liar.key, parent=saved[0].key, tokens=liar.tokens, tenant="tenant")
    )
    rig.save(saved[:3])
    rig.save([saved[3]], slots=[9])
    rig.save(saved[4:], slots=[10, 11])
    plan = agent.plan_load(chain, 0, 6)
    assert plan is not None
    assert plan.last_block == 3
    assert agent.metrics.report().collisions == 1
    agent.release(plan)


def test_what_computing_beats_is_declined_and_tried_again_from_time_to_time(rig: Rig) -> None:
    clock = Clock()
    chain, agent = grown(range(40)), KVAgent(rig.hierarchy, clock=clock)
    rig.engine.during = lambda: rig.clock.pass_by(0.001)
    rig.save(records(chain))
    first = agent.plan_load(chain, 0, 10)
    assert first is not None, "nothing was measured: it is tried"
    rig.engine.during = lambda: rig.clock.pass_by(10.0)
    rig.end_of(rig.hierarchy.load(first.block_ids, range(10)))
    agent.release(first)
    load_s = rig.hierarchy.estimate_load_s(first.block_ids)
    assert load_s is not None
    assert load_s > 1.0
    agent.prefill.measured(1_000_000, 1.0)
    clock.pass_by(PROBE_EVERY_S / 2)
    assert agent.plan_load(chain, 0, 10) is None
    assert agent.declined == 1
    clock.pass_by(PROBE_EVERY_S)
    probe = agent.plan_load(chain, 0, 10)
    assert probe is not None
    agent.release(probe)
    assert agent.plan_load(chain, 0, 10) is None, "one try, then it is left alone again"
    agent.costs.prefill = PrefillSpeed()
    agent.prefill.measured(1000, 1000.0)
    worth_it = agent.plan_load(chain, 0, 10)
    assert worth_it is not None
    agent.release(worth_it)
    assert agent.declined == 2


def test_the_prefill_speed_is_that_of_long_prefills_once_there_was_one() -> None:
    speed = PrefillSpeed()
    assert speed.tokens_per_s is None
    for tokens, seconds in ((0, 1.0), (10, 0.0), (-1, 1.0)):
        speed.measured(tokens, seconds)
    assert speed.tokens_per_s is None
    speed.measured(10, 1.0)
    assert speed.tokens_per_s == 10
    speed.measured(SHORT_PREFILL_TOKENS, 0.01)
    assert speed.tokens_per_s == pytest.approx(SHORT_PREFILL_TOKENS * 100)
    speed.measured(3, 1.0)
    assert speed.tokens_per_s == pytest.approx(SHORT_PREFILL_TOKENS * 100)
    speed.measured(SHORT_PREFILL_TOKENS, 0.02)
    assert speed.tokens_per_s == pytest.approx(SHORT_PREFILL_TOKENS * 90)
