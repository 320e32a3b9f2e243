"""Long work of several tasks is done a slice a turn."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from gateway.upstream.sliced_work import SlicedWork


async def test_two_works_go_on_side_by_side_and_the_loop_with_them() -> None:
    sliced = SlicedWork()
    done: list[str] = []

    def work(name: str) -> Iterator[None]:
        for _ in range(10):
            done.append(name)
            yield

    async def other() -> None:
        for _ in range(10):
            done.append("loop")
            await asyncio.sleep(0)

    await asyncio.gather(sliced.run(work("a")), sliced.run(work("b")), other())
    assert sorted(done) == ["a"] * 10 + ["b"] * 10 + ["loop"] * 10
    assert "aa" not in "".join(done[:20]).replace("loop", "")
    assert done.index("loop") < 3


async def test_work_elsewhere_leaves_the_loop_and_the_slices_of_others_going() -> None:
    sliced = SlicedWork()
    may_end = threading.Event()
    done: list[int] = []

    def here() -> Iterator[None]:
        for place in range(10):
            done.append(place)
            yield
        may_end.set()

    elsewhere = asyncio.create_task(sliced.run_in_thread(lambda: may_end.wait(60.0)))
    await asyncio.sleep(0)
    await sliced.run(here())
    assert await elsewhere
    assert done == [*range(10)]


async def test_work_elsewhere_is_done_one_at_a_time_and_says_how_it_failed() -> None:
    sliced = SlicedWork()
    at_once: list[int] = []
    most: list[int] = []

    def work() -> int:
        at_once.append(1)
        most.append(len(at_once))
        time.sleep(0.002)
        at_once.pop()
        return 7

    def failing() -> int:
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        await sliced.run_in_thread(failing)
    assert await asyncio.gather(*[sliced.run_in_thread(work) for _ in range(20)]) == [7] * 20
    assert max(most) == 1


async def test_work_that_fails_says_so_and_leaves_the_turn_to_others() -> None:
    sliced = SlicedWork()

    def failing() -> Iterator[None]:
        yield
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        await sliced.run(failing())
    await sliced.run(iter(()))
