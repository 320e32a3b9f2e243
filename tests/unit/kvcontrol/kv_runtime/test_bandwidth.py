"""A lane's speed: what was lately, and what is overdue."""

import pytest

from kvcontrol.kv_runtime.bandwidth import Bandwidth

MB = 10**6


class Link:
    """A device that moves ``mb_per_s`` and is otherwise at rest."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.speed = Bandwidth()

    def load(self, mb: float, mb_per_s: float, *, moved: float | None = None) -> float:
        """Carry one batch; returns the speed afterwards in MB/s."""
        self.now_s += 60.0  # at rest
        self.speed.busy(self.now_s)
        self.now_s += mb / mb_per_s
        self.speed.ended(int((mb if moved is None else moved) * MB), self.now_s, at_rest=True)
        return self.known()

    def known(self, running_mb: float = 0.0) -> float:
        known = self.speed.bytes_per_s(self.now_s, int(running_mb * MB))
        assert known is not None
        return known / MB


def test_nothing_is_known_before_the_first_byte() -> None:
    link = Link()
    assert link.speed.bytes_per_s(0.0, 0) is None
    link.speed.busy(1.0)
    assert link.speed.bytes_per_s(5.0, MB) is None
    link.speed.ended(0, 9.0, at_rest=True)
    assert link.speed.bytes_per_s(9.0, 0) is None


def test_the_first_load_says_how_fast_it_is_and_rest_says_nothing() -> None:
    link = Link()
    assert link.load(100, 10_000) == pytest.approx(10_000)
    assert link.load(100, 10_000) == pytest.approx(10_000)


def test_a_device_that_turns_slow_is_seen_after_one_load() -> None:
    link = Link()
    for _ in range(100):
        link.load(100, 10_000)
    assert link.load(100, 50) < 200
    assert link.load(100, 50) == pytest.approx(50, rel=0.2)


def test_a_device_that_turns_slow_is_seen_in_small_loads_too() -> None:
    link = Link()
    for _ in range(100):
        link.load(10, 10_000)
    speeds = [link.load(10, 50) for _ in range(8)]
    assert speeds[0] < 10_000 * 0.8
    assert speeds[4] < 500


def test_a_device_that_is_quick_again_is_trusted_again_after_a_second_of_work() -> None:
    link = Link()
    link.load(100, 50)
    for _ in range(20):
        link.load(500, 10_000)
    assert link.known() > 5_000


def test_what_runs_too_long_counts_before_it_ends() -> None:
    link = Link()
    link.load(100, 10_000)
    link.speed.busy(link.now_s)
    link.now_s += 0.001
    assert link.known(running_mb=100) == pytest.approx(10_000)
    link.now_s += 2.0
    assert link.known(running_mb=100) == pytest.approx(50, rel=0.01)
    link.speed.ended(100 * MB, link.now_s, at_rest=True)
    assert link.known() < 250


def test_time_in_which_all_failed_counts() -> None:
    link = Link()
    link.load(100, 10_000)
    assert link.load(100, 50, moved=0) < 500


def test_batches_side_by_side_share_their_time() -> None:
    speed = Bandwidth()
    speed.busy(0.0)
    speed.ended(100 * MB, 1.0, at_rest=False)
    speed.ended(100 * MB, 1.001, at_rest=False)
    speed.ended(100 * MB, 2.0, at_rest=True)
    known = speed.bytes_per_s(2.0, 0)
    assert known is not None
    assert known / MB == pytest.approx(180, rel=0.15)
