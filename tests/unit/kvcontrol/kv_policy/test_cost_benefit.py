"""What a move is worth follows from what was measured; and the model says how wrong it was."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy import (
    CostBenefitModel,
    Estimate,
    Migration,
    MigrationMode,
    MigrationPolicy,
    PolicyError,
    PredictionError,
    Prices,
    Quantity,
)

DOWN = Migration(
    src_tier=CacheTier.DDR,
    dst_tier=CacheTier.NVME,
    block_ids=(BlockId(1), BlockId(2)),
    blocks=2,
    tokens=1_000,
    size_bytes=2_000,
)


@pytest.fixture
def model() -> CostBenefitModel:
    model = CostBenefitModel(Prices(background=0.1, s_per_byte=1e-6))
    model.computed(1_000, 1.0)
    return model


def test_without_measurements_there_is_no_estimate() -> None:
    model = CostBenefitModel()
    assert model.evaluate_migration(DOWN, transfer_s=1, load_s=1) is None
    assert model.load_saves_s(100, 0.1) is None
    model.computed(1_000, 1.0)
    assert model.evaluate_migration(DOWN, transfer_s=None, load_s=1) is None
    assert model.evaluate_migration(DOWN, transfer_s=1, load_s=None) is None
    assert model.load_saves_s(100, None) is None


def test_saved_and_spent_are_seconds(model: CostBenefitModel) -> None:
    estimate = model.evaluate_migration(DOWN, transfer_s=0.5, load_s=0.2, probability=0.25)
    assert estimate is not None
    assert estimate.saved_s == pytest.approx(0.25 * (1.0 - 0.2))
    assert estimate.spent_s == pytest.approx(0.1 * 0.5 + 1e-6 * 2_000)
    assert estimate.net_benefit_s == pytest.approx(0.2 - 0.052)
    assert model.load_saves_s(1_000, 1.5) == pytest.approx(-0.5)


def test_a_load_that_takes_longer_than_computing_saves_nothing(model: CostBenefitModel) -> None:
    estimate = model.evaluate_migration(DOWN, transfer_s=0.5, load_s=3.0, probability=1)
    assert estimate is not None
    assert estimate.saved_s == 0
    assert estimate.net_benefit_s < 0


@pytest.mark.parametrize("probability", [-0.1, 1.1, math.nan])
def test_a_probability_that_cannot_be_is_refused(model: CostBenefitModel, probability: float) -> None:
    with pytest.raises(ValueError, match=r"probability is .*; allowed is 0 to 1"):
        model.evaluate_migration(DOWN, transfer_s=1, load_s=1, probability=probability)


@pytest.mark.parametrize("wrong", [-1, math.inf, math.nan, True, "1", 10**400])
def test_seconds_and_prices_that_cannot_be_are_refused_and_change_nothing(model: CostBenefitModel, wrong: Any) -> None:
    calls: dict[str, Callable[[], object]] = {
        "background": lambda: Prices(background=wrong),
        "s_per_byte": lambda: Prices(s_per_byte=wrong),
        "saved_s": lambda: Estimate(saved_s=wrong, spent_s=1, reuse_probability=1),
        "spent_s": lambda: Estimate(saved_s=1, spent_s=wrong, reuse_probability=1),
        "load_s": lambda: model.load_saves_s(100, wrong),
        "first_s": lambda: model.break_even_blocks(block_tokens=100, first_s=wrong, more_s=0.1),
        "more_s": lambda: model.break_even_blocks(block_tokens=100, first_s=0.1, more_s=wrong),
        "transfer_s": lambda: model.evaluate_migration(DOWN, transfer_s=wrong, load_s=0.1),
        " load_s": lambda: model.evaluate_migration(DOWN, transfer_s=0.1, load_s=wrong),
    }
    for name, call in calls.items():
        with pytest.raises(PolicyError, match=rf"^{name.strip()} is .*; it must be >= 0 and finite"):
            call()
    assert model.errors() == CostBenefitModel().errors()


@pytest.mark.parametrize("wrong", [-64, -1, 1.5, math.inf, math.nan, True, None, 10**400])
def test_numbers_of_blocks_and_tokens_that_cannot_be_are_refused_and_change_nothing(
    model: CostBenefitModel, wrong: Any
) -> None:
    calls: dict[str, Callable[[], object]] = {
        "blocks": lambda: model.stored(CacheTier.NVME, wrong),
        " blocks": lambda: model.reused(CacheTier.NVME, wrong),
        "  blocks": lambda: replace(DOWN, blocks=wrong),
        "tokens": lambda: replace(DOWN, tokens=wrong),
        "size_bytes": lambda: replace(DOWN, size_bytes=wrong),
        " tokens": lambda: model.load_saves_s(wrong, 0.1),
        "  tokens": lambda: model.prefill.seconds_for(wrong),
        "block_tokens": lambda: model.break_even_blocks(block_tokens=wrong, first_s=0.1, more_s=0.1),
    }
    for name, call in calls.items():
        with pytest.raises(PolicyError, match=rf"^{name.strip()} is .*; it must be >= [01] .*, a whole number"):
            call()
    assert model.reuse_probability(CacheTier.NVME) == 0.5


def test_a_mode_that_there_is_not_is_refused() -> None:
    with pytest.raises(PolicyError, match="mode is 'never'; allowed is always or worthwhile"):
        MigrationPolicy(cast("MigrationMode", "never"))
    assert MigrationPolicy(cast("MigrationMode", "always")).mode is MigrationMode.ALWAYS


def test_the_probability_of_a_reuse_is_counted_for_each_tier(model: CostBenefitModel) -> None:
    assert model.reuse_probability(CacheTier.NVME) == 0.5
    model.stored(CacheTier.NVME, 100_000)
    model.reused(CacheTier.NVME, 10_000)
    assert model.reuse_probability(CacheTier.NVME) == pytest.approx(0.2, abs=0.01), "the stored ones were halved"
    assert model.reuse_probability(CacheTier.DDR) == 0.5
    model.reused(CacheTier.NVME, 1_000_000)
    assert model.reuse_probability(CacheTier.NVME) == 1


def test_a_load_breaks_even_where_its_first_cost_is_earned(model: CostBenefitModel) -> None:
    def blocks(first_s: float | None, more_s: float | None) -> float | None:
        return model.break_even_blocks(block_tokens=100, first_s=first_s, more_s=more_s)  # a block computes in 0.1 s

    assert blocks(0.05, 0.05) == 1
    assert blocks(1.0, 0.05) == 19  # 1 + 18 x 0.05 = 1.9 = 19 x 0.1
    assert blocks(1.0, 0.2) == math.inf
    assert blocks(None, 0.2) is None
    assert CostBenefitModel().break_even_blocks(block_tokens=100, first_s=1, more_s=1) is None


def test_the_model_knows_how_wrong_it_was(model: CostBenefitModel) -> None:
    for _ in range(3):
        model.came(Quantity.LOAD, predicted_s=1.0, actual_s=2.0)
    load = model.errors()[Quantity.LOAD]
    assert (load.predictions, load.relative, load.bias) == (3, 0.5, -0.5)
    assert load.factor == pytest.approx(2)
    assert model.errors()[Quantity.COMPUTE].predictions == 0
    model.computed(1_000, 0.5)
    compute = model.errors()[Quantity.COMPUTE]
    assert (compute.predictions, compute.relative) == (1, 1.0)
    model.computed(5, 5.0)
    assert model.errors()[Quantity.COMPUTE].predictions == 1, "a few tokens say nothing of the speed"


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan, 1e-320, 10**400])
def test_what_cannot_be_compared_is_no_prediction(wrong: float) -> None:
    error = PredictionError()
    error.came(predicted=wrong, actual=1e9)
    error.came(predicted=1e9, actual=wrong)
    assert error.report() == PredictionError().report()


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan, 1e-320])
def test_a_time_that_cannot_be_is_no_speed(model: CostBenefitModel, seconds: float) -> None:
    model.computed(1_000, seconds)
    model.computed(10**400, 1.0)
    model.computed(-5, 1.0)
    assert model.prefill.seconds_for(1_000) == 1.0


def test_what_nobody_can_judge_is_made() -> None:
    decision = MigrationPolicy(MigrationMode.WORTHWHILE).plan(DOWN, None)
    assert decision.plan is DOWN
    assert decision.net_benefit_s is None


def test_what_is_not_worth_it_is_made_always_or_only_now_and_then(model: CostBenefitModel) -> None:
    good = model.evaluate_migration(DOWN, transfer_s=0.1, load_s=0.1, probability=1)
    bad = model.evaluate_migration(DOWN, transfer_s=0.1, load_s=2.0, probability=1)
    always, worthwhile = MigrationPolicy(), MigrationPolicy(MigrationMode.WORTHWHILE)
    for policy in (always, worthwhile):
        assert policy.plan(DOWN, good).plan is DOWN
    made = [always.plan(DOWN, bad).plan is not None for _ in range(32)]
    assert all(made)
    decisions = [worthwhile.plan(DOWN, bad) for _ in range(32)]
    assert sum(decision.plan is not None for decision in decisions) == 2, "else nothing would be measured again"
    assert decisions[0].reason == "not worth it"
    path = (CacheTier.DDR, CacheTier.NVME)
    assert always.benefits()[path].declined_blocks == 0
    assert always.benefits()[path].not_worth_blocks == 64
    assert worthwhile.benefits()[path].declined_blocks == 60
    assert worthwhile.benefits()[path].worth_blocks == 2
    assert worthwhile.benefits()[path].net_benefit_s > always.benefits()[path].net_benefit_s


def test_what_was_decided_may_be_asked_for_while_more_is() -> None:
    policy = MigrationPolicy()
    worth = Estimate(saved_s=2, spent_s=1, reuse_probability=1)
    waiting = iter(range(1_000))

    class Tier:
        """One whose hash lets a decision over another path come in between, as another thread's might."""

        def __hash__(self) -> int:
            if is_asked and (place := next(waiting, None)) is not None:
                policy.plan(replace(DOWN, src_tier=cast("CacheTier", place)), worth)
            return 7

    is_asked = False
    for _ in range(3):
        policy.plan(replace(DOWN, src_tier=cast("CacheTier", Tier())), worth)
    is_asked = True
    assert len(policy.benefits()) == 3
    assert next(waiting) > 3
