"""Who may use how much, and who gives way."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime import QuotaError, QuotaManager, SaveRequest, TenantQuota
from tests.support.examples import examples
from tests.support.tiers import BLOCK_BYTES, Rig, config_of, path

DDR = CacheTier.DDR


def _quotas(capacity: int = 100, **used: int) -> QuotaManager:
    quotas = QuotaManager()
    quotas.open_tier(DDR, capacity_blocks=capacity, block_bytes=10)
    for tenant, blocks in used.items():
        quotas.charge(tenant, DDR, blocks)
    return quotas


def _quota(guaranteed: int = 0, burst: int | None = None, weight: float = 1.0) -> TenantQuota:
    """Return a quota of blocks of 10 bytes."""
    return TenantQuota(
        guaranteed_bytes=guaranteed * 10, burst_bytes=None if burst is None else burst * 10, weight=weight
    )


def test_nobody_is_pushed_below_what_is_guaranteed() -> None:
    quotas = _quotas(a=60, b=40)
    quotas.set("a", DDR, _quota(guaranteed=55))
    assert dict(quotas.donors("b", DDR, 10, {"a": 60, "b": 0})) == {"a": 5}


def test_a_tenant_above_its_burst_gives_its_own_first() -> None:
    quotas = _quotas(a=30, b=70)
    quotas.set("a", DDR, _quota(burst=32))
    allowance = quotas.may_use("a", DDR, 6)
    assert (allowance.blocks, allowance.own_first) == (6, 4)
    assert quotas.may_use("a", DDR, 50).blocks == 32
    assert quotas.may_use("c", DDR, 6).own_first == 0


def test_those_with_most_above_their_guarantee_by_weight_give_first() -> None:
    quotas = _quotas(a=60, b=30, c=10)
    quotas.set("a", DDR, _quota(weight=3.0))
    evictable = {"a": 60, "b": 30, "c": 10}
    assert dict(quotas.donors("c", DDR, 6, evictable)) == {"b": 6}
    assert sum(blocks for _, blocks in quotas.donors("c", DDR, 14, evictable)) == 14


tenants = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(st.integers(0, 20), st.integers(0, 8), st.sampled_from([0.5, 1.0, 2.0]), st.integers(0, 20)),
    min_size=1,
)


@given(state=tenants, wanted=st.integers(0, 40), who=st.sampled_from("abcdefg"))
def test_donors_are_those_that_one_block_after_the_other_would_name(
    state: dict[str, tuple[int, int, float, int]], wanted: int, who: str
) -> None:
    quotas = _quotas(200, **{name: used for name, (used, _, _, _) in state.items()})
    for name, (_, guaranteed, weight, _) in state.items():
        quotas.set(name, DDR, _quota(guaranteed=guaranteed, weight=weight))
    evictable = {name: min(used, free) for name, (used, _, _, free) in state.items()}
    given_away = dict.fromkeys(state, 0)
    for _ in range(wanted):

        def above(name: str) -> float:
            used, guaranteed, weight, _ = state[name]
            return (used - given_away[name] - guaranteed + (wanted if name == who else 0)) / weight

        able = [
            name
            for name, (used, guaranteed, _, _) in state.items()
            if given_away[name] < evictable[name] and (name == who or used - given_away[name] > guaranteed)
        ]
        if not able:
            break
        given_away[max(able, key=lambda name: (above(name), -ord(name)))] += 1
    assert dict(quotas.donors(who, DDR, wanted, evictable)) == {n: blocks for n, blocks in given_away.items() if blocks}


def test_guarantees_must_fit() -> None:
    quotas = _quotas(100)
    quotas.set("a", DDR, _quota(guaranteed=60))
    with pytest.raises(QuotaError, match="add up to 110"):
        quotas.set("b", DDR, _quota(guaranteed=50))
    assert quotas.get("b", DDR) == TenantQuota()
    quotas.set("a", DDR, None)
    quotas.set("b", DDR, _quota(guaranteed=50))
    early = QuotaManager()
    early.set("a", DDR, _quota(guaranteed=60))
    with pytest.raises(QuotaError, match="it has 50"):
        early.open_tier(DDR, capacity_blocks=50, block_bytes=10)
    with pytest.raises(QuotaError, match="DDR: a default quota guarantees bytes to any number"):
        QuotaManager(defaults={DDR: _quota(guaranteed=1)})


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"guaranteed_bytes": -1}, "guaranteed_bytes"),
        ({"guaranteed_bytes": 5, "burst_bytes": 4}, "burst_bytes"),
        ({"weight": 0.0}, "weight"),
        ({"weight": float("nan")}, "weight"),
    ],
)
def test_a_quota_that_cannot_be_says_why(fields: dict[str, float], match: str) -> None:
    with pytest.raises(QuotaError, match=match):
        TenantQuota(**fields)  # type: ignore[arg-type]


def test_accounts_of_tenants_that_left_are_forgotten() -> None:
    quotas = _quotas()
    for tenant in range(1000):
        quotas.charge(str(tenant), DDR, 1)
        quotas.refund(str(tenant), DDR, 1)
    assert quotas.usage(DDR) == {}
    with pytest.raises(QuotaError, match="gives back"):
        quotas.refund("1", DDR, 1)


def test_whoever_has_no_quota_of_its_own_has_the_tiers() -> None:
    quotas = QuotaManager(defaults={DDR: _quota(burst=30)})
    quotas.open_tier(DDR, capacity_blocks=100, block_bytes=10)
    quotas.open_tier(CacheTier.NVME, capacity_blocks=100, block_bytes=10)
    assert quotas.get("a", DDR) == _quota(burst=30)
    assert quotas.may_use("a", DDR, 40).blocks == 30
    assert quotas.may_use("a", CacheTier.NVME, 40).blocks == 40
    quotas.charge("a", DDR, 30)
    quotas.set("a", DDR, _quota(burst=50))
    assert quotas.may_use("a", DDR, 20).own_first == 0
    quotas.set("a", DDR, None)
    assert quotas.may_use("a", DDR, 20).own_first == 20


def test_what_bursts_cost_is_not_remembered_of_any_number_of_tenants() -> None:
    quotas = _quotas()
    for tenant in range(5000):
        quotas.charge(str(tenant), DDR, 1)
        quotas.count_over_burst(str(tenant), DDR, 3)
        quotas.refund(str(tenant), DDR, 1)
    assert 0 < len(quotas.usage(DDR)) <= 1024


# In the hierarchy, under contention.


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(config_of(), ddr=64, nvme=128, hbm=64)
    yield made
    made.hierarchy.check_integrity()
    made.close()


def _contend(rig: Rig, tenants: dict[str, int], rounds: int) -> dict[str, list[int]]:
    """Let tenants save new paths at their pace (blocks a round), in random order; their blocks in DDR every round."""
    rng = random.Random(3)  # noqa: S311 - reproducible, not secret
    names = {tenant: 10**6 * (place + 1) + len(rig.finished) * 1000 for place, tenant in enumerate(tenants)}
    used: dict[str, list[int]] = {tenant: [] for tenant in tenants}
    for _ in range(rounds):
        for tenant in rng.sample(list(tenants), len(tenants)):
            first = names[tenant]
            names[tenant] += tenants[tenant]
            records = path(range(first, names[tenant]), tenant=tenant)
            requests = [SaveRequest(one, slot) for slot, one in enumerate(records)]
            rig.end_of(rig.hierarchy.save(requests).ticket_id)
        usage = rig.quotas.usage(DDR)
        for tenant, blocks in used.items():
            blocks.append(usage[tenant].used_blocks if tenant in usage else 0)
    return used


def _jain(shares: list[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def test_equal_tenants_that_all_want_more_get_equal_shares(rig: Rig) -> None:
    used = _contend(rig, {"a": 1, "b": 3, "c": 9, "d": 16}, 60)
    backlogged = range(30, 60)  # by then each has brought more than a quarter of the tier
    assert min(_jain([float(used[tenant][turn]) for tenant in used]) for turn in backlogged) >= 0.95
    assert all(sum(used[tenant][turn] for tenant in used) == 64 for turn in backlogged)


def test_shares_follow_weights(rig: Rig) -> None:
    rig.quotas.set("a", DDR, TenantQuota(weight=3.0))
    used = _contend(rig, {"a": 8, "b": 8}, 40)
    assert used["a"][-1] == pytest.approx(48, abs=8)


def test_a_noisy_tenant_leaves_others_their_guarantee(rig: Rig) -> None:
    rig.quotas.set("quiet", DDR, TenantQuota(guaranteed_bytes=20 * BLOCK_BYTES))
    rig.quotas.set("noisy", DDR, TenantQuota(weight=100.0))
    quiet = path(range(20), tenant="quiet")
    rig.save(quiet)
    used = _contend(rig, {"noisy": 16}, 20)
    assert used["noisy"][-1] == 44
    assert {rig.tiers(one).split(" ")[0] for one in quiet} == {"DDR"}


saves = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 12)), min_size=10, max_size=60)
shares = st.fixed_dictionaries(
    {name: st.tuples(st.integers(0, 4), st.sampled_from([0.01, 1.0, 100.0])) for name in "abcd"}
)


@settings(max_examples=examples(60), deadline=None)
@given(work=saves, quotas=shares)
def test_nobody_pushes_another_below_its_guarantee_in_any_tier_whatever_they_do(
    work: list[tuple[str, int]], quotas: dict[str, tuple[int, float]]
) -> None:
    rig = Rig(config_of(), ddr=16, nvme=24, hbm=16)
    guaranteed = {name: blocks for name, (blocks, _) in quotas.items()}
    for tier in (DDR, CacheTier.NVME):
        for name, (blocks, weight) in quotas.items():
            rig.quotas.set(name, tier, TenantQuota(guaranteed_bytes=blocks * BLOCK_BYTES, weight=weight))
    for turn, (who, count) in enumerate(work):
        before = {tier: rig.quotas.usage(tier) for tier in (DDR, CacheTier.NVME)}
        rig.save(path(range(100 * turn, 100 * turn + count), tenant=who))
        rig.run()
        for tier, used in before.items():
            now = rig.quotas.usage(tier)
            for name, usage in used.items():
                if name != who:
                    assert now[name].used_blocks >= min(usage.used_blocks, guaranteed[name]), (tier, name)
    rig.hierarchy.check_integrity()
    rig.close()


def test_a_tenant_at_its_burst_turns_over_its_own_blocks(rig: Rig) -> None:
    rig.quotas.set("a", DDR, TenantQuota(burst_bytes=10 * BLOCK_BYTES))
    used = _contend(rig, {"a": 4, "b": 4}, 30)
    assert max(used["a"]) <= 10
    assert used["b"][-1] == 54
    assert rig.quotas.usage(DDR)["a"].over_burst_blocks > 0


def test_a_burst_that_shrinks_is_kept_soon(rig: Rig) -> None:
    _contend(rig, {"a": 8, "b": 8}, 10)
    rig.quotas.set("a", DDR, TenantQuota(burst_bytes=5 * BLOCK_BYTES))
    rig.poll()
    assert rig.quotas.usage(DDR)["a"].used_blocks == 5


def test_what_a_smaller_burst_takes_away_goes_in_steps() -> None:
    rig = Rig(config_of(), ddr=4096, nvme=0, hbm=64)
    for first in range(0, 4096, 64):
        rig.save(path(range(first, first + 64), tenant="a"))
    rig.changes.clear()
    rig.quotas.set("a", DDR, TenantQuota(burst_bytes=96 * BLOCK_BYTES))
    steps = []
    while rig.quotas.usage(DDR)["a"].used_blocks > 96:
        rig.poll()
        steps.append(len(rig.changes))
        rig.changes.clear()
    assert max(steps) <= 256, "no poll takes away more than that"
    assert sum(steps) == 4000
    rig.hierarchy.check_integrity()
    rig.close()


def test_a_quota_that_is_taken_back_leaves_the_one_that_the_engine_started_with() -> None:
    quotas = QuotaManager()
    quotas.set("a", DDR, _quota(guaranteed=20))
    quotas.open_tier(DDR, capacity_blocks=100, block_bytes=10)
    for tenant in ("a", "b"):
        quotas.set(tenant, DDR, _quota(burst=50))
    assert {tenant: each.changed for tenant, each in quotas.usage(DDR).items()} == {"a": True, "b": True}
    for tenant in ("a", "b"):
        quotas.set(tenant, DDR, None)
    assert {tenant: (each.quota, each.changed) for tenant, each in quotas.usage(DDR).items()} == {
        "a": (_quota(guaranteed=20), False)
    }
    assert (quotas.get("a", DDR), quotas.get("b", DDR)) == (_quota(guaranteed=20), TenantQuota())
