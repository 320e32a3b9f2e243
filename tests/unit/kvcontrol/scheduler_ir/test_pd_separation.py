import pytest

from kvcontrol.core.roles import KVTransport
from kvcontrol.scheduler_ir import (
    Device,
    Handover,
    HybridOnly,
    PhaseLimits,
    Placement,
    Side,
    SplitReason,
    ThresholdSeparator,
)

TCP = {KVTransport.MIGRATION: "tcp"}
BOTH = {KVTransport.MIGRATION: "tcp", KVTransport.TIERS: "store-1"}
ANSWER = Side(device=Device("d"), domains=BOTH)
PREFILL = Side(device=Device("p"), domains=BOTH)


def separator(threshold: int = 256, **limits: int) -> ThresholdSeparator:
    return ThresholdSeparator(min_uncached_tokens=threshold, limits=PhaseLimits(**limits))


def test_a_long_prompt_is_computed_elsewhere() -> None:
    split = separator().split(1000, ANSWER, [PREFILL])
    handover = Handover(prefill=Device("p"), transport=KVTransport.MIGRATION)
    assert split.placement == Placement(answer=Device("d"), handover=handover)
    assert split.reason is SplitReason.SEPARATED
    assert split.uncached_tokens == 1000


@pytest.mark.parametrize(
    ("tokens", "held", "prefills", "limits", "reason"),
    [
        (255, 0, [PREFILL], {}, SplitReason.SHORT),
        (1000, 745, [PREFILL], {}, SplitReason.HELD),
        (None, 0, [PREFILL], {}, SplitReason.UNKNOWN_PROMPT),
        (None, 0, [], {}, SplitReason.NO_PREFILL_INSTANCE),
        (1000, 0, [], {}, SplitReason.NO_PREFILL_INSTANCE),
        (1000, 0, [PREFILL._replace(domains={})], {}, SplitReason.NO_TRANSPORT),
        (1000, 0, [PREFILL._replace(domains={KVTransport.MIGRATION: "rdma"})], {}, SplitReason.NO_TRANSPORT),
        (1000, 0, [PREFILL._replace(device=ANSWER.device)], {}, SplitReason.NO_TRANSPORT),
        (1000, 0, [PREFILL._replace(requests=4)], {"requests": 4}, SplitReason.PREFILL_BUSY),
        (1000, 0, [PREFILL._replace(computing_tokens=1)], {"tokens": 1000}, SplitReason.PREFILL_BUSY),
    ],
)
def test_otherwise_it_is_computed_where_it_is_answered_and_the_reason_says_why(
    tokens: int | None, held: int, prefills: list[Side], limits: dict[str, int], reason: SplitReason
) -> None:
    split = separator(**limits).split(tokens, ANSWER._replace(held_tokens=held), prefills)
    assert split.reason is reason
    assert split.placement == Placement(answer=ANSWER.device)
    assert split.uncached_tokens == (None if tokens is None else tokens - held)


def test_a_prompt_longer_than_the_budget_goes_to_an_idle_instance() -> None:
    assert separator(tokens=100).split(1000, ANSWER, [PREFILL]).reason is SplitReason.SEPARATED


def test_who_has_least_to_compute_is_chosen_its_own_work_included() -> None:
    warm = PREFILL._replace(device=Device("warm"), held_tokens=900, computing_tokens=500)
    idle = PREFILL._replace(device=Device("idle"))
    split = separator().split(1000, ANSWER, [idle, warm])
    assert split.placement.prefill == "warm"
    assert split.uncached_tokens == 100
    assert separator().split(1000, ANSWER, [idle, warm._replace(computing_tokens=950)]).placement.prefill == "idle"


def test_of_equal_ones_the_one_with_fewer_requests_and_then_the_first_by_name_is_chosen() -> None:
    sides = [PREFILL._replace(device=Device(name), requests=count) for name, count in (("c", 1), ("b", 0), ("a", 1))]
    assert separator().split(1000, ANSWER, sides).placement.prefill == "b"
    assert separator().split(1000, ANSWER, sides[::2]).placement.prefill == "a"


def test_transports_are_tried_in_their_order() -> None:
    tiers_first = ThresholdSeparator(min_uncached_tokens=1, transports=(KVTransport.TIERS, KVTransport.MIGRATION))
    for side, transport in ((PREFILL, KVTransport.TIERS), (PREFILL._replace(domains=TCP), KVTransport.MIGRATION)):
        placement = tiers_first.split(10, ANSWER, [side]).placement
        assert placement.handover is not None
        assert placement.handover.transport is transport


def test_hybrid_only_never_separates() -> None:
    split = HybridOnly().split(10_000, ANSWER, [PREFILL])
    assert split.placement == Placement(answer=ANSWER.device)
    assert HybridOnly().split(None, ANSWER, []).uncached_tokens is None
