"""Memory of bodies: bounded for all, and each tenant leaves as much free as it holds."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import RateLimitedError
from gateway.http.body_memory import TIMES, BodyMemory, BodyReservation
from gateway.types import TenantId

MOST = 1000 * TIMES
ACME, OTHER = TenantId("acme"), TenantId("other")


def memory() -> tuple[BodyMemory, Counter[str]]:
    sheds: Counter[str] = Counter()
    return BodyMemory(MOST, shed=lambda reason: sheds.update([reason])), sheds


def filled(room: BodyReservation, piece: int) -> int:
    """Take pieces until one is refused; return how many bytes were taken."""
    taken = 0
    try:
        while True:
            room.take(piece)
            taken += piece
    except RateLimitedError:
        return taken


def test_one_tenant_gets_half_and_the_next_one_a_part_of_the_rest() -> None:
    bodies, sheds = memory()
    first, second = bodies.reserve(ACME), bodies.reserve(OTHER)
    assert filled(first, 1) == MOST // 2 // TIMES
    assert filled(second, 1) == MOST // 4 // TIMES
    assert sheds == {"body_memory": 2}
    first.give_back()
    assert filled(bodies.reserve(OTHER), 1) == (MOST // 2 - MOST // 4) // TIMES


def test_a_refusal_says_what_is_held_and_that_it_may_pass_later() -> None:
    bodies, _ = memory()
    bodies.reserve(ACME).take(400)
    with pytest.raises(RateLimitedError, match="hold 3200 of 8000 bytes") as caught:
        bodies.reserve(ACME).take(300)
    assert (caught.value.reason, caught.value.retry_after_s) == ("saturated", 2)


def test_more_is_kept_of_a_body_than_it_counted_only_where_it_fits() -> None:
    bodies, sheds = memory()
    room = bodies.reserve(ACME)
    room.take(10)
    room.keep(1000)
    assert bodies.held_bytes == 1000
    with pytest.raises(RateLimitedError, match="saturated"):
        room.keep(MOST)
    assert (bodies.held_bytes, sheds) == (1000, {"body_memory": 1})
    room.give_back()
    assert bodies.held_bytes == 0


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([ACME, OTHER, TenantId("third")]), st.integers(0, 400)),
        max_size=60,
    )
)
def test_what_is_held_is_what_rooms_hold_and_never_more_than_the_bound(steps: list[tuple[int, TenantId, int]]) -> None:
    bodies, _ = memory()
    rooms: dict[tuple[int, TenantId], BodyReservation] = {}
    for number, tenant, size in steps:
        room = rooms.setdefault((number, tenant), bodies.reserve(tenant))
        if size == 0:
            room.give_back()
            room.give_back()
            continue
        if size % 7 == 0:  # it has been read, and so much of it is kept
            kept = min(size, room._size)
            room.keep(kept)
            assert room._size == kept
            continue
        free, own = MOST - bodies.held_bytes, sum(each._size for (_, owner), each in rooms.items() if owner == tenant)
        try:
            room.take(size)
        except RateLimitedError:
            assert own + TIMES * size > free
        else:
            assert own + TIMES * size <= free
        assert bodies.held_bytes == sum(each._size for each in rooms.values()) <= MOST
    for room in rooms.values():
        if room._size >= TIMES:
            room.give_back_some(1)
        room.give_back()
    assert bodies.held_bytes == 0
    assert not bodies._held
