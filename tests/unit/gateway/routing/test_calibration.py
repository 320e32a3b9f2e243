import random

import pytest

from gateway.routing import Calibration, CostModel
from kvcontrol.core import InstanceId

A, B = InstanceId("a"), InstanceId("b")
COSTS = CostModel(prefill_tokens_per_s=2000, decode_load_s=0.02)


def shown(  # noqa: PLR0913 - what the world is like
    calibration: Calibration, *, speed: float, base_s: float, decode_s: float, times: int, seed: int = 1
) -> None:
    chance = random.Random(seed)  # noqa: S311 - a load, no secret
    for _ in range(times):
        tokens, running = chance.randrange(20, 4000), chance.randrange(8)
        took_s = base_s + tokens / speed + running * decode_s
        calibration.observe(A, tokens=tokens, running=running, took_s=took_s * chance.uniform(0.9, 1.1))


@pytest.mark.parametrize(("speed", "base_s", "decode_s"), [(20_000, 0.02, 0.001), (300, 0.2, 0.05), (2000, 0.0, 0.0)])
def test_speeds_are_found_whatever_was_assumed(speed: float, base_s: float, decode_s: float) -> None:
    calibration = Calibration(COSTS)
    assert calibration.speeds(A) is None
    shown(calibration, speed=speed, base_s=base_s, decode_s=decode_s, times=200)
    found = calibration.speeds(A)
    assert found is not None
    assert found.prefill_tokens_per_s == pytest.approx(speed, rel=0.15)
    assert found.base_s == pytest.approx(base_s, abs=0.1)
    assert found.decode_load_s == pytest.approx(decode_s, abs=0.02)
    assert calibration.speeds(B) == found, "one that nothing is known of is taken to be like the others"


def test_an_instance_that_only_once_looked_slow_is_soon_taken_to_be_like_the_others() -> None:
    calibration = Calibration(COSTS)
    for _ in range(30):
        calibration.observe(B, tokens=100, running=0, took_s=5.0)
    slow = calibration.speeds(B)
    shown(calibration, speed=50_000, base_s=0.005, decode_s=0.001, times=8)
    halfway = calibration.speeds(B)
    shown(calibration, speed=50_000, base_s=0.005, decode_s=0.001, times=40)
    fast, old = calibration.speeds(A), calibration.speeds(B)
    assert slow is not None
    assert halfway is not None
    assert fast is not None
    assert old is not None
    assert slow.base_s > halfway.base_s > old.base_s
    assert old.base_s == pytest.approx(fast.base_s, abs=0.001)
    assert old.prefill_tokens_per_s == pytest.approx(fast.prefill_tokens_per_s, rel=0.05)
    calibration.observe(B, tokens=100, running=0, took_s=5.0)  # still slow: its own past counts again
    again = calibration.speeds(B)
    assert again is not None
    assert again.base_s > old.base_s


def test_a_change_of_speed_is_followed() -> None:
    calibration = Calibration(COSTS)
    shown(calibration, speed=8000, base_s=0.01, decode_s=0.0, times=100)
    shown(calibration, speed=1000, base_s=0.01, decode_s=0.0, times=100, seed=2)
    found = calibration.speeds(A)
    assert found is not None
    assert found.prefill_tokens_per_s == pytest.approx(1000, rel=0.3)


def test_one_odd_answer_moves_little_and_nothing_breaks_the_bounds() -> None:
    calibration = Calibration(COSTS)
    shown(calibration, speed=4000, base_s=0.01, decode_s=0.001, times=100)
    calibration.observe(A, tokens=100, running=0, took_s=500.0)
    found = calibration.speeds(A)
    assert found is not None
    assert found.prefill_tokens_per_s == pytest.approx(4000, rel=0.6)
    for took_s in (1e-9, 1e9, 0.0, 1e-9):
        for tokens in (0, 10**7):
            calibration.observe(A, tokens=tokens, running=10**4, took_s=took_s)
    found = calibration.speeds(A)
    assert found is not None
    assert found.prefill_tokens_per_s > 0
    assert found.base_s >= 0
    assert found.decode_load_s >= 0


def test_how_long_answers_take_is_averaged_and_all_is_forgotten_with_the_instance() -> None:
    calibration = Calibration(COSTS)
    for _ in range(50):
        calibration.ended(2.0)
        calibration.observe(A, tokens=1, running=0, took_s=0.1)
    found = calibration.speeds(A)
    assert found is not None
    assert found.answer_s == pytest.approx(2.0)
    calibration.forget(A)
    assert calibration.speeds(A) is None
