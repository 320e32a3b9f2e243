import asyncio

import pytest

from gateway.telemetry import LoopLag
from tests.support.running_gateway import eventually


async def test_lateness_is_told_and_added_up_also_while_it_lasts() -> None:
    now_s = 0.0
    seen: list[float] = []
    lag = LoopLag(seen.append, clock=lambda: now_s)
    task = asyncio.create_task(lag.run())
    try:
        await asyncio.sleep(0)
        assert lag.total_s == 0
        now_s = 3.0
        assert lag.total_s == pytest.approx(2.9)
        await eventually(lambda: len(seen) == 2)
        assert seen == [pytest.approx(2.9), 0.0]
        assert lag.total_s == pytest.approx(2.9)
    finally:
        task.cancel()
