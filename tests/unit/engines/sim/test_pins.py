"""Pinned prefixes stay in every tier of a simulated engine, and what is to be forgotten goes."""

import pytest

from engines.control.errors import RefusedError
from engines.sim.engine import SimEngine
from engines.sim.pins import SimPins
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.prefix_control import Invalidation
from kvcontrol.kv_policy import make_policy
from tests.support.simulated import Listening, Mirror, chain, engine, request, run

HBM, DDR = CacheTier.HBM, CacheTier.DDR
CONTEXT = 128
"""32 of the 64 blocks."""
PREFIX = range(10)
KEYS = chain(PREFIX).keys


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def flood(simulated: SimEngine, now_s: float) -> None:
    """Requests that take all the room there is."""
    run(simulated, [(now_s + n, request(f"{now_s} {n}", range(100 * n, 100 * n + 30))) for n in range(1, 6)])


def check(simulated: SimEngine, pins: SimPins) -> None:
    simulated.check_integrity()
    pins.check_integrity()


def test_a_pinned_prefix_outlives_others_and_a_policy_and_goes_when_its_time_is_over() -> None:
    mirror, clock = Mirror(), Clock()
    simulated = engine(Listening(), sink=mirror, context_tokens=CONTEXT)
    pins = SimPins(simulated, clock=clock)
    pins.pin(KEYS, 10.0)
    assert pins.report().pins[0].missing == 10
    run(simulated, [(0.0, request("a", PREFIX))])
    (pin,) = pins.report().pins
    assert (pin.blocks, pin.tokens, pin.tiers, pin.missing, pin.left_s) == (10, 40, {HBM: 10}, 0, 10.0)
    flood(simulated, 100.0)
    simulated.pool.swap(make_policy("fifo", capacity_blocks=64))
    flood(simulated, 200.0)
    check(simulated, pins)
    assert mirror.held[HBM].keys() >= set(KEYS)
    assert pins.counts() == {HBM: 10}
    clock.now_s = 11.0
    assert not pins.report().pins
    flood(simulated, 300.0)
    check(simulated, pins)
    assert mirror.held[HBM].keys().isdisjoint(KEYS)


def test_what_comes_before_a_pinned_block_stays_whenever_it_comes() -> None:
    simulated = engine(Listening(), context_tokens=CONTEXT)
    pins = SimPins(simulated)
    pins.pin(KEYS[6:], None)  # nothing is here of what comes before it
    run(simulated, [(0.0, request("a", PREFIX))])
    flood(simulated, 100.0)
    check(simulated, pins)
    assert simulated.pool.cached.leading(KEYS, 10) == 10
    assert pins.unpin(KEYS[-1])
    assert not pins.unpin(KEYS[-1])
    pins.pin(KEYS[6:8], None)  # and here all of it is
    assert pins.report().pinned_blocks == 8
    check(simulated, pins)


def test_more_than_leaves_room_for_the_longest_request_is_refused() -> None:
    pins = SimPins(engine(Listening(), context_tokens=216))
    assert pins.limit().blocks == 9
    with pytest.raises(RefusedError, match="the longest request takes 54 of the 64 blocks"):
        pins.pin(KEYS, None)
    assert not pins.report().pins
    with pytest.raises(RefusedError, match=r"0\.25 of the 64 blocks of HBM"):
        SimPins(engine(Listening(), context_tokens=4)).pin(chain(range(17)).keys, None)


def test_a_prefix_is_held_below_hbm_too_and_stands_after_a_reset() -> None:
    mirror = Mirror()
    simulated = engine(Listening(), sink=mirror, context_tokens=CONTEXT, ddr_blocks=60)
    pins = SimPins(simulated)
    pins.pin(KEYS, None)
    run(simulated, [(0.0, request("a", PREFIX))])
    assert pins.report().pins[0].tiers == {HBM: 10, DDR: 10}
    flood(simulated, 100.0)
    assert mirror.held[DDR].keys() >= set(KEYS)
    assert pins.reset() == {HBM: 63, DDR: 60}
    assert not any(mirror.held.values())
    assert pins.report().pins[0].missing == 10
    run(simulated, [(1000.0, request("a", PREFIX))])
    assert pins.counts() == {HBM: 10, DDR: 10}
    check(simulated, pins)
    simulated.close()


def test_an_invalidated_prefix_goes_with_what_follows_it_and_ends_its_pins() -> None:
    mirror = Mirror()
    simulated = engine(Listening(), sink=mirror, context_tokens=CONTEXT, ddr_blocks=60)
    pins = SimPins(simulated)
    run(simulated, [(0.0, request("a", PREFIX)), (10.0, request("other", range(50, 55)))])
    pins.pin(KEYS, None)
    assert pins.invalidate([KEYS[5], KEYS[4]]) == Invalidation(
        dropped={HBM: 6, DDR: 6}, in_use_blocks=0, unpinned=[KEYS[-1].hex()]
    )
    assert set(KEYS) & mirror.held[HBM].keys() == set(KEYS[:4]) == set(KEYS) & mirror.held[DDR].keys()
    assert len(mirror.held[HBM]) == 9
    check(simulated, pins)
    simulated.close()


def test_what_a_request_uses_is_forgotten_when_it_has_ended() -> None:
    mirror = Mirror()
    simulated = engine(Listening(), sink=mirror, context_tokens=CONTEXT, ddr_blocks=60)
    pins = SimPins(simulated)
    run(simulated, [(0.0, request("a", PREFIX))])
    simulated.submit(request("b", PREFIX, output=9), 10.0)
    said = pins.invalidate(KEYS[2:3])
    assert (said.dropped, said.in_use_blocks) == ({HBM: 0, DDR: 8}, 8)
    pins.work()
    assert simulated.pool.cached.leading(KEYS, 10) == 10
    simulated.advance(100.0)
    pins.work()
    assert simulated.pool.cached.leading(KEYS, 10) == 2
    assert set(KEYS) & mirror.held[DDR].keys() <= set(KEYS[:2])
    check(simulated, pins)
    simulated.close()
