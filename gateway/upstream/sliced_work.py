"""Long work on the event loop in slices, with other tasks between them."""

import asyncio
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

_DONE = object()


class SlicedWork:
    """Shared by all who have long work: a turn of the loop does at most one slice of one of them, in fair order."""

    def __init__(self) -> None:
        self._one_slice = asyncio.Lock()
        self._one_elsewhere = asyncio.Lock()

    async def run(self, work: Iterator[object]) -> None:
        """Do all of ``work``, which yields after each slice; raises what it raises."""
        while True:
            async with self._one_slice:
                if next(work, _DONE) is _DONE:
                    return
                await asyncio.sleep(0)

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, done in a thread; one at a time."""
        async with self._one_elsewhere:
            return await asyncio.to_thread(work)
