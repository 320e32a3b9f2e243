import string

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


def test_it_forgets_after_its_lifetime() -> None:
    recent = RecentRoutes(lifetime_s=2)
    recent.remember(blocks("xyz"), A, 0)
    assert recent.expected(blocks("x"), A, 1.9) == 1
    assert recent.expected(blocks("x"), A, 2) == 0


def test_it_holds_no_more_than_its_capacity_and_the_oldest_go_first() -> None:
    recent = RecentRoutes(lifetime_s=2, capacity_blocks=12)
    kept = []
    for letter in string.ascii_letters:
        recent.remember(blocks(letter), A, 1)
        assert len(recent) <= 12
        kept.append([each for each in string.ascii_letters if recent.expected(blocks(each), A, 1)])
    assert all(len(each) > 9 for each in kept[10:])
    assert all("".join(each) in string.ascii_letters for each in kept), "others than the last ones are kept"
    recent.remember(blocks("0123456789"), A, 1)
    assert recent.expected(blocks("0123456789"), A, 1) == 3
    assert len(recent) <= 12


def test_a_block_that_is_sent_again_counts_for_its_last_place_in_whatever_generation() -> None:
    recent = RecentRoutes(lifetime_s=2, capacity_blocks=12)
    recent.remember(blocks("x"), A, 0)
    recent.remember(blocks("abc"), A, 0)
    recent.remember(blocks("x"), B, 1)
    assert (recent.place(blocks("x")[0], 1), recent.place(blocks("x")[0], 2.5)) == (B, B)
    recent.forget(B)
    assert recent.place(blocks("x")[0], 1) is None


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
