from gateway.registry import OutlierDetector, OutlierRules
from kvcontrol.core import InstanceId

A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")


def counted(detector: OutlierDetector, instance: InstanceId, good: int, bad: int, now_s: float = 0) -> None:
    for number in range(good + bad):
        detector.answered(instance, good=number < good, now_s=now_s)


def test_one_that_fails_where_others_do_not_is_an_outlier_and_says_why() -> None:
    detector = OutlierDetector(OutlierRules())
    counted(detector, A, 4, 6)
    counted(detector, B, 10, 0)
    counted(detector, C, 9, 1)
    assert detector.verdict(A, 0) == "60% of its answers failed lately, 5% of the others'"
    assert detector.verdict(B, 0) is None
    assert detector.verdict(C, 0) is None


def test_when_everybody_fails_nobody_is_an_outlier() -> None:
    detector = OutlierDetector(OutlierRules())
    for instance in (A, B, C):
        counted(detector, instance, 1, 9)
    assert [detector.verdict(instance, 0) for instance in (A, B, C)] == [None] * 3


def test_without_peers_that_answer_nobody_is_an_outlier() -> None:
    detector = OutlierDetector(OutlierRules())
    counted(detector, A, 0, 20)
    assert detector.verdict(A, 0) is None
    counted(detector, B, 0, 2)
    assert detector.verdict(A, 0) is None


def test_a_few_failures_are_no_verdict_and_old_ones_are_forgotten() -> None:
    detector = OutlierDetector(OutlierRules(half_life_s=10))
    counted(detector, B, 100, 0)
    counted(detector, A, 0, 5)
    assert detector.verdict(A, 0) is None
    counted(detector, A, 0, 5)
    assert detector.verdict(A, 0) is not None
    assert detector.verdict(A, 30) is None
    detector.forget(A)
    assert A not in detector.shares(0)
