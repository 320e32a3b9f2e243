from gateway.routing import RecentRoutes
from kvcontrol.core import BlockHash, InstanceId

A, B = InstanceId("a"), InstanceId("b")


def blocks(text: str) -> list[BlockHash]:
    return [BlockHash(letter.encode() * 16) for letter in text]


def test_the_leading_run_that_went_there_is_expected() -> None:
    recent = RecentRoutes(lifetime_s=2)
    recent.remember(blocks("xyz"), A, 0)
    assert recent.expected(blocks("xyw"), A, 1) == 2
    assert recent.expected(blocks("wxy"), A, 1) == 0
    assert recent.expected(blocks("xyz"), B, 1) == 0


def test_a_block_counts_for_its_last_place() -> None:
    recent = RecentRoutes(lifetime_s=2)
    recent.remember(blocks("xyz"), A, 0)
    recent.remember(blocks("xy"), B, 1)
    assert recent.expected(blocks("xyz"), B, 1) == 2
    assert recent.expected(blocks("xyz"), A, 1) == 0


def test_it_forgets_after_its_lifetime_and_beyond_its_capacity() -> None:
    recent = RecentRoutes(lifetime_s=2, capacity_blocks=3)
    recent.remember(blocks("xyz"), A, 0)
    assert recent.expected(blocks("x"), A, 2) == 0
    recent.remember(blocks("w"), A, 1)
    assert recent.expected(blocks("x"), A, 1) == 0
    assert recent.expected(blocks("w"), A, 1) == 1
    recent.remember(blocks("abcdefgh"), A, 1)
    assert recent.expected(blocks("abcdefgh"), A, 1) == 3


def test_an_instance_that_is_gone_is_forgotten() -> None:
    recent = RecentRoutes(lifetime_s=2)
    recent.remember(blocks("xy"), A, 0)
    recent.remember(blocks("z"), B, 0)
    recent.forget(A)
    assert recent.expected(blocks("xy"), A, 1) == 0
    assert recent.expected(blocks("z"), B, 1) == 1


def test_without_a_lifetime_nothing_is_remembered() -> None:
    recent = RecentRoutes(lifetime_s=0)
    recent.remember(blocks("xy"), A, 0)
    assert recent.expected(blocks("xy"), A, 0) == 0
