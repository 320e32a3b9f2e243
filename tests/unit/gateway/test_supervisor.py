import asyncio

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
