import asyncio
from contextlib import suppress

import pytest

from gateway.http.interrupt import Interrupt, InterruptError


async def test_a_fired_interrupt_ends_the_wait_and_leaves_no_trace() -> None:
    interrupt = Interrupt()
    asyncio.get_running_loop().call_soon(interrupt.fire)
    with pytest.raises(InterruptError), interrupt:
        await asyncio.sleep(3600)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_firing_after_the_end_does_nothing() -> None:
    with Interrupt() as interrupt:
        await asyncio.sleep(0)
    interrupt.fire()
    await asyncio.sleep(0)
    assert not interrupt.fired


async def test_an_outer_one_goes_through_an_inner_one() -> None:
    outer, inner = Interrupt(), Interrupt()
    asyncio.get_running_loop().call_soon(outer.fire)
    with pytest.raises(InterruptError), outer, inner:
        await asyncio.sleep(3600)
    assert not inner.fired


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    async def work() -> None:
        with Interrupt() as interrupt:
            asyncio.get_running_loop().call_soon(interrupt.fire)
            await asyncio.sleep(3600)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_it_works_inside_and_around_a_timeout() -> None:
    interrupt = Interrupt()
    asyncio.get_running_loop().call_soon(interrupt.fire)
    with pytest.raises(InterruptError), interrupt:
        async with asyncio.timeout(3600):
            await asyncio.sleep(3600)
    with pytest.raises(TimeoutError), Interrupt():
        async with asyncio.timeout(0):
            await asyncio.sleep(3600)


async def test_a_cancellation_that_was_swallowed_is_raised_where_somebody_looks() -> None:
    interrupt = Interrupt()

    async def work() -> None:
        with interrupt:
            interrupt.check()
            asyncio.get_running_loop().call_soon(interrupt.fire)
            with suppress(asyncio.CancelledError):  # as asyncio.wait_for on Python 3.11, when its result has come
                await asyncio.sleep(3600)
            interrupt.check()
            pytest.fail("it goes on")

    with pytest.raises(InterruptError):
        await work()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
