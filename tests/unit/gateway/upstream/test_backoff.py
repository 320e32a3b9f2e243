"""A feed that keeps losing its footing starts anew ever later, latest where its peer is at fault."""

import pytest

from gateway.upstream.backoff import Backoff, Reason

LIFE = [
    Reason.CONNECTION_LOST,
    Reason.EVENTS_DROPPED,
    Reason.INSTANCE_AWAY,
    Reason.NEW_ENDPOINT,
    Reason.NEW_EPOCH,
    Reason.SNAPSHOT_FAILED,
]
FAULTS = [reason for reason in Reason if reason not in LIFE]


@pytest.mark.parametrize(("reasons", "longest_s"), [(LIFE, 5.0), (FAULTS, 60.0)])
def test_pauses_double_up_to_a_bound(reasons: list[Reason], longest_s: float) -> None:
    for reason in reasons:
        backoff = Backoff()
        pauses = [backoff.pause_s(reason, 0.0) for _ in range(12)]
        assert pauses[:3] == [0.2, 0.4, 0.8]
        assert pauses == sorted(pauses)
        assert pauses[-1] == longest_s


def test_who_lasted_starts_from_the_first_pause_again() -> None:
    backoff = Backoff()
    for _ in range(12):
        backoff.pause_s(Reason.UNDECODABLE, 0.0)
    assert backoff.pause_s(Reason.UNDECODABLE, 59.0) == 60.0
    assert backoff.pause_s(Reason.UNDECODABLE, 61.0) == 0.2


def test_an_hour_of_garbage_every_second_takes_less_than_a_hundred_snapshots() -> None:
    backoff = Backoff()
    passed_s, starts = 0.0, 0
    while passed_s < 3600:
        passed_s += 1.0 + backoff.pause_s(Reason.UNDECODABLE, 1.0)
        starts += 1
    assert starts < 100


def test_a_peer_at_fault_that_goes_and_returns_waits_no_longer_than_others() -> None:
    backoff = Backoff()
    for _ in range(12):
        backoff.pause_s(Reason.GAP, 0.0)
    assert backoff.pause_s(Reason.INSTANCE_AWAY, 0.0) == 5.0
