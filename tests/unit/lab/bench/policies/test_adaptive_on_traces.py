"""What the adaptive policy finds of real traces beside LRU: on slices in every run, on all of them in the slow lane."""

from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from kvcontrol.kv_policy import make_policy
from lab.replay.policy import replay
from lab.traces import AGENTIC, MOONCAKE, Request, read_by_time, read_trace

TRACES = Path(__file__).parents[6] / "shared" / "traces"
FLOOR = 0.99
"""The share of LRU's tokens that it always finds."""

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="the traces are not beside this checkout")


@cache
def conversation() -> list[Request]:
    return list(read_trace(TRACES / MOONCAKE))


@cache
def agentic(*, by_time: bool) -> list[Request]:
    return read_by_time(TRACES / AGENTIC) if by_time else list(read_trace(TRACES / AGENTIC))


def gain(requests: list[Request], capacity_blocks: int) -> float:
    """Return the tokens found for each one that LRU finds."""
    ours, lru = (
        replay(requests, make_policy(name, capacity_blocks=capacity_blocks), capacity_blocks=capacity_blocks).token
        for name in ("adaptive", "lru")
    )
    return ours / lru if lru else 1.0


@pytest.mark.parametrize("capacity_blocks", [300, 1_000, 4_000])
def test_on_a_slice_of_conversations_it_is_not_behind_lru(capacity_blocks: int) -> None:
    assert gain(list(islice(conversation(), 1_200)), capacity_blocks) >= FLOOR


@pytest.mark.parametrize("capacity_blocks", [1_000, 3_000])
def test_on_a_slice_of_coding_sessions_it_is_not_behind_lru(capacity_blocks: int) -> None:
    assert gain(agentic(by_time=True)[:120], capacity_blocks) >= FLOOR


@pytest.mark.parametrize("capacity_blocks", [100, 500])
def test_where_prompts_fill_the_cache_it_is_not_behind_lru(capacity_blocks: int) -> None:
    assert gain(agentic(by_time=False)[:60], capacity_blocks) >= FLOOR


@pytest.mark.slow
def test_it_finds_15_percent_more_than_lru_of_conversations_in_three_million_tokens() -> None:
    assert gain(conversation(), 5_859) >= 1.15


@pytest.mark.slow
@pytest.mark.parametrize(
    "capacity_blocks", [8, 50, 200, 300, 1_000, 3_000, 5_859, 10_000, 20_000, 30_000, 50_000, 100_000]
)
def test_on_all_conversations_it_is_not_behind_lru(capacity_blocks: int) -> None:
    assert gain(conversation(), capacity_blocks) >= FLOOR


@pytest.mark.slow
@pytest.mark.parametrize("capacity_blocks", [100, 500, 887, 1_775, 4_438, 8_876, 17_752, 44_382])
def test_on_all_coding_sessions_at_once_it_is_not_behind_lru(capacity_blocks: int) -> None:
    assert gain(agentic(by_time=True), capacity_blocks) >= FLOOR


@pytest.mark.slow
@pytest.mark.parametrize("capacity_blocks", [300, 500, 700, 887, 1_200, 1_775, 4_438, 8_876, 17_752, 44_382])
def test_on_coding_sessions_one_by_one_it_is_not_behind_lru(capacity_blocks: int) -> None:
    assert gain(agentic(by_time=False), capacity_blocks) >= FLOOR
