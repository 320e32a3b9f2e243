import asyncio

import pytest

from gateway.supervisor import running, until_one_ends


async def test_a_loop_that_fails_or_ends_is_started_again_and_its_neighbours_go_on() -> None:
    failures: list[str] = []
    starts: dict[str, int] = {"fails": 0, "ends": 0, "steady": 0}
    enough = asyncio.Event()

    async def fails() -> None:
        starts["fails"] += 1
        if starts["fails"] >= 3:
            enough.set()
        raise RuntimeError("as it happens")

    async def ends() -> None:
        starts["ends"] += 1

    async def steady() -> None:
        starts["steady"] += 1
        await asyncio.sleep(3600)

    async with running({"fails": fails, "ends": ends, "steady": steady}, on_failure=failures.append):
        await asyncio.wait_for(enough.wait(), 20)
    assert starts["steady"] == 1
    assert starts["ends"] >= 2
    assert failures.count("fails") >= 2
    assert not [task for task in asyncio.all_tasks() if task.get_name() in starts]


async def test_work_that_fails_while_it_is_cancelled_ends_all_the_same() -> None:
    failures: list[str] = []
    begun = asyncio.Event()

    async def fails_when_cancelled() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise RuntimeError("what it looked at is gone") from None

    async def loop() -> None:
        await until_one_ends(fails_when_cancelled(), asyncio.sleep(3600))

    async with asyncio.timeout(20):
        async with running({"leaves": loop}, on_failure=failures.append):
            await begun.wait()
    assert failures == []


async def test_of_work_done_together_the_first_end_is_the_end_of_all() -> None:
    cancelled = asyncio.Event()

    async def others() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise RuntimeError("as it happens")

    async with asyncio.timeout(20):
        with pytest.raises(RuntimeError, match="as it happens"):
            await until_one_ends(others(), fails())
        assert cancelled.is_set()
        await until_one_ends(asyncio.sleep(0), others())
