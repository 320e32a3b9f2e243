"""Long work of several tasks is done a slice a turn."""

import asyncio
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


async def test_work_that_fails_says_so_and_leaves_the_turn_to_others() -> None:
    turns = Turns()

    def failing() -> Iterator[None]:
        yield
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        await turns.exhaust(failing())
    await turns.exhaust(iter(()))
