import asyncio
import time

from engines.lmdeploy.loop_lag import LoopLag
from kvcontrol.series.gateway import LAG_SECONDS
from tests.support.running_gateway import eventually


async def test_a_loop_that_is_held_up_is_seen_to_be_late() -> None:
    lag = LoopLag()
    lag.start(asyncio.get_running_loop())
    await eventually(lambda: sum(lag.report().buckets) > 1)
    before = lag.report()
    time.sleep(0.35)  # it was due within 0.1 s of it
    await eventually(lambda: sum(lag.report().buckets) > sum(before.buckets))
    lag.stop()
    late = lag.report()
    assert late.total_s - before.total_s > 0.2
    place = next(index for index, bound in enumerate(LAG_SECONDS) if bound >= 0.25)
    assert sum(late.buckets[place:]) > sum(before.buckets[place:])


async def test_after_its_stop_nothing_is_counted() -> None:
    lag = LoopLag()
    lag.start(asyncio.get_running_loop())
    lag.stop()
    lag.stop()
    await asyncio.sleep(0.15)
    assert sum(lag.report().buckets) == 0
