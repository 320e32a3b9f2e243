"""Predictors of lifetimes: what they say is true on average, and they find what there is to be found."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from kvcontrol.kv_policy.allowed import MOST_TOKENS, PolicyError
from lab.research.lifetimes.calibration import CalibratedPredictor
from lab.research.lifetimes.lifetime import MOST_LIFETIME, Estimate, Estimator, LifetimeFeatures
from lab.research.lifetimes.network import NetworkEstimator, NetworkKind
from lab.research.lifetimes.table import ConstantEstimator, TableEstimator

ESTIMATORS: dict[str, Callable[[], Estimator]] = {
    "constant": ConstantEstimator,
    "statistical": TableEstimator,
    "lstm": lambda: NetworkEstimator(NetworkKind.LSTM),
    "transformer": lambda: NetworkEstimator(NetworkKind.TRANSFORMER),
}


@pytest.fixture(params=ESTIMATORS.values(), ids=ESTIMATORS.keys())
def predictor(request: pytest.FixtureRequest) -> CalibratedPredictor:
    return CalibratedPredictor(request.param())


def alone(prompt_tokens: int, *, age: float = 0) -> LifetimeFeatures:
    return LifetimeFeatures(prompt_tokens=prompt_tokens, age=age)


@pytest.mark.parametrize(("name", "make"), ESTIMATORS.items())
def test_a_predictor_has_its_estimators_name(name: str, make: Callable[[], Estimator]) -> None:
    assert CalibratedPredictor(make()).name == name


def test_before_anything_ended_nothing_is_said(predictor: CalibratedPredictor) -> None:
    assert predictor.predict_ttl(alone(100)) is None
    predictor.update(alone(100), 5.0)
    assert predictor.predict_ttl(alone(100)) is None


def test_a_lifetime_that_cannot_be_is_refused_and_not_learnt() -> None:
    said = []
    for make in ESTIMATORS.values():
        estimator, untouched = make(), make()
        predictor = CalibratedPredictor(estimator)
        for wrong in (0, -1, math.nan, math.inf, 1e16, True, "1", None, 10**400):
            for learn in (predictor.update, estimator.learn):
                with pytest.raises(PolicyError, match=r"^lifetime is .*; it must be > 0 and finite, at most 1e\+15"):
                    learn(alone(1), cast("float", wrong))
        for each in (estimator, untouched):
            for number in range(256):
                each.learn(alone(number), 1.0 + number)
        said.append((estimator.estimate(alone(7)), untouched.estimate(alone(7))))
    assert all(one == other is not None for one, other in said)


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf, 1e308, True, "1", 10**400])
@pytest.mark.parametrize("name", ["prompt_tokens", "new_tokens", "age", "past"])
def test_features_that_cannot_be_are_refused(name: str, wrong: object) -> None:
    features: dict[str, Any] = {"prompt_tokens": 1, name: (1.0, wrong) if name == "past" else wrong}
    with pytest.raises(PolicyError, match=rf"^{name}(\[1\])? is .*; it must be >"):
        LifetimeFeatures(**features)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_of_features_that_can_be_something_is_said_however_large_they_are(name: str) -> None:
    predictor = CalibratedPredictor(ESTIMATORS[name]())
    for number in range(256):
        predictor.update(alone(number), 1.0 + number)
    largest = LifetimeFeatures(
        prompt_tokens=MOST_TOKENS, new_tokens=MOST_TOKENS, past=(MOST_LIFETIME,) * 50, age=MOST_LIFETIME
    )
    said = [
        predictor.predict_ttl(each)
        for each in (largest, replace(largest, age=0.0), replace(largest, new_tokens=0, past=(1e-320,)))
    ]
    predictor.update(replace(largest, age=0.0), MOST_LIFETIME)
    said.append(predictor.predict_ttl(alone(5)))
    for each in said:
        assert each is not None
        assert all(math.isfinite(value) and value >= 0 for value in (each.left, each.left_p90, each.confidence))


def test_a_threshold_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="threshold is 2; allowed is 0 to 1"):
        CalibratedPredictor(ConstantEstimator(), threshold=2)


def test_all_alike_is_learnt_by_all(predictor: CalibratedPredictor) -> None:
    rng = random.Random(1)  # noqa: S311 - reproducible, not secret
    for _ in range(1_500):
        predictor.update(alone(100), 200 * math.exp(rng.gauss(0, 0.1)))
    said = predictor.predict_ttl(alone(100))
    assert said is not None
    # A network's last digits differ between processors, and what it has learnt with them: hence the room.
    assert said.left == pytest.approx(200, rel=0.25)
    assert 190 < said.left_p90 < 320
    assert said.usable
    assert said.confidence > 0.75


@pytest.mark.parametrize("name", ["statistical", "lstm", "transformer"])
def test_what_follows_from_the_prompt_or_from_the_chats_past_is_found(name: str) -> None:
    rng = random.Random(2)  # noqa: S311 - reproducible, not secret
    predictor = CalibratedPredictor(ESTIMATORS[name]())

    def draw() -> tuple[LifetimeFeatures, float]:
        if rng.random() < 0.5:
            prompt = rng.choice([100, 3_000])
            return alone(prompt), (40 if prompt == 100 else 900) * math.exp(rng.gauss(0, 0.1))
        usual = rng.choice([30, 700])
        past = tuple(usual * math.exp(rng.gauss(0, 0.1)) for _ in range(3))
        return LifetimeFeatures(prompt_tokens=500, new_tokens=50, past=past), usual * math.exp(rng.gauss(0, 0.1))

    for _ in range(2_500):
        predictor.update(*draw())
    for _ in range(20):
        features, lifetime = draw()
        said = predictor.predict_ttl(features)
        assert said is not None
        assert said.left == pytest.approx(lifetime, rel=0.6)


def test_nine_of_ten_stay_below_the_high_quantile_even_of_an_estimator_that_is_wrong() -> None:
    class Wrong:
        name = "wrong"

        def estimate(self, features: LifetimeFeatures) -> Estimate | None:  # noqa: ARG002
            return Estimate(left=10, left_p90=11, sureness=0.95)

        def learn(self, features: LifetimeFeatures, lifetime: float) -> None:
            """It never learns."""

    rng = random.Random(3)  # noqa: S311 - reproducible, not secret
    predictor, below = CalibratedPredictor(Wrong()), 0
    for number in range(6_000):
        lifetime = 100 * math.exp(rng.gauss(0, 0.5))
        said = predictor.predict_ttl(alone(1))
        assert said is not None
        below += number >= 2_000 and lifetime <= said.left_p90
        predictor.update(alone(1), lifetime)
    assert below / 4_000 == pytest.approx(0.9, abs=0.02)
    said = predictor.predict_ttl(alone(1))
    assert said is not None
    assert said.confidence < 0.05, "it says that it is sure, and is not"
    assert not said.usable


@pytest.mark.parametrize("name", ["constant", "statistical"])
def test_what_has_got_old_already_lasts_as_long_as_those_that_got_so_old(name: str) -> None:
    predictor = CalibratedPredictor(ESTIMATORS[name]())
    for number in range(400):
        predictor.update(alone(100), 10 if number % 2 else 1_000)
    young, old = predictor.predict_ttl(alone(100)), predictor.predict_ttl(alone(100, age=100))
    assert young is not None
    assert old is not None
    assert young.left < 1_000
    assert old.left == pytest.approx(900, rel=0.1)
    beyond = predictor.predict_ttl(alone(100, age=5_000))
    assert beyond is not None
    assert beyond.left >= 0


def test_a_table_keeps_a_bounded_number_of_contexts() -> None:
    table = TableEstimator(most_contexts=50)
    for prompt in range(1, 5_000):
        table.learn(alone(prompt * 10), 5)
    assert len(table) == 50
    with pytest.raises(PolicyError, match="most_contexts is 0; it must be >= 1, a whole number"):
        TableEstimator(most_contexts=0)


def test_a_network_of_the_same_seed_says_the_same() -> None:
    said = []
    for _ in range(2):
        network = NetworkEstimator(NetworkKind.LSTM, seed=7)
        for number in range(300):
            network.learn(alone(number), 1 + number % 50)
        said.append(network.estimate(alone(10)))
    assert said[0] == said[1] is not None


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_a_network_learns_on_a_thread_that_computes_without_gradients(mode: str) -> None:
    import torch

    said = []
    for without in (False, True):
        with getattr(torch, mode)(mode=without) if mode == "inference_mode" else torch.set_grad_enabled(not without):
            network = NetworkEstimator(NetworkKind.LSTM, seed=7)
            for number in range(300):
                network.learn(alone(number), 1 + number % 50)
            said.append(network.estimate(alone(10)))
    assert said[0] == said[1] is not None
