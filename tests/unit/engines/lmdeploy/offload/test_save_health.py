"""Saves of which nothing arrives are a failing tier; saves that were refused are not."""

import pytest

from engines.lmdeploy.offload.save_health import FAILING_SAVES, SaveHealth
from kvcontrol.kv_runtime import BlockStatus, Finished, Reason
from kvcontrol.kv_runtime.ticket import MOVED, End, TicketId, TicketKind

DEVICE = End(BlockStatus.FAILED, Reason.DEVICE)


def ended(*ends: End) -> Finished:
    return Finished(ticket_id=TicketId(1), kind=TicketKind.SAVE, block_ids=[None] * len(ends), ends=ends)


def test_a_tier_fails_when_many_saves_in_a_row_bring_nothing_and_recovers_with_the_first_block() -> None:
    health = SaveHealth()
    for _ in range(FAILING_SAVES - 1):
        health.ended(ended(DEVICE, DEVICE))
    assert health.failure == ""
    health.ended(ended(DEVICE))
    assert (health.failed_in_a_row, health.failure) == (FAILING_SAVES, "blocks can't be saved: device")
    health.ended(ended(DEVICE, MOVED))
    assert (health.failed_in_a_row, health.failure) == (0, "")


def test_a_save_that_could_not_be_begun_says_why() -> None:
    health = SaveHealth()
    for _ in range(FAILING_SAVES):
        health.raised("the KV tiers failed to start a save: too long")
    assert health.failure == "the KV tiers failed to start a save: too long"


@pytest.mark.parametrize("reason", [Reason.NO_SPACE, Reason.NOT_WORTH, Reason.QUEUE_FULL, Reason.CANCELLED])
def test_what_was_refused_says_nothing_of_the_tier(reason: Reason) -> None:
    health = SaveHealth()
    health.ended(ended(DEVICE))
    health.ended(ended(End(BlockStatus.FAILED, reason)))
    assert health.failed_in_a_row == 1
