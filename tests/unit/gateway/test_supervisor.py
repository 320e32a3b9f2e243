import asyncio
import contextlib

from gateway.supervisor import running


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


async def test_a_loop_whose_tasks_fail_while_it_is_cancelled_ends_all_the_same() -> None:
    failures: list[str] = []
    begun = asyncio.Event()

    async def fails_when_cancelled() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise RuntimeError("what it looked at is gone") from None

    async def swallows() -> None:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)

    async def group() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fails_when_cancelled())
            tasks.create_task(asyncio.sleep(3600))

    for loop in (group, swallows):
        begun.clear()
        async with asyncio.timeout(20):
            async with running({"leaves": loop}, on_failure=failures.append):
                await begun.wait()
    assert failures == []
