"""Long work of several tasks is done a slice a turn."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from gateway.upstream.turns import Turns


async def test_two_works_go_on_side_by_side_and_the_loop_with_them() -> None:
    turns = Turns()
    done: list[str] = []

    def work(name: str) -> Iterator[None]:
        for _ in range(10):
            done.append(name)
            yield

    async def other() -> None:
        for _ in range(10):
            done.append("loop")
            await asyncio.sleep(0)

    await asyncio.gather(turns.exhaust(work("a")), turns.exhaust(work("b")), other())
    assert sorted(done) == ["a"] * 10 + ["b"] * 10 + ["loop"] * 10
    assert "aa" not in "".join(done[:20]).replace("loop", "")
    assert done.index("loop") < 3


async def test_work_elsewhere_leaves_the_loop_and_the_slices_of_others_going() -> None:
    turns = Turns()
    may_end = threading.Event()
    sliced: list[int] = []

    def here() -> Iterator[None]:
        for place in range(10):
            sliced.append(place)
            yield
        may_end.set()

    elsewhere = asyncio.create_task(turns.elsewhere(lambda: may_end.wait(60.0)))
    await asyncio.sleep(0)
    await turns.exhaust(here())
    assert await elsewhere
    assert sliced == [*range(10)]


async def test_work_elsewhere_is_done_one_at_a_time_and_says_how_it_failed() -> None:
    turns = Turns()
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
        await turns.elsewhere(failing)
    assert await asyncio.gather(*[turns.elsewhere(work) for _ in range(20)]) == [7] * 20
    assert max(most) == 1


async def test_work_that_fails_says_so_and_leaves_the_turn_to_others() -> None:
    turns = Turns()

    def failing() -> Iterator[None]:
        yield
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        await turns.exhaust(failing())
    await turns.exhaust(iter(()))
