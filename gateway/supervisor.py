"""Background loops that outlive their own failures.

A loop that raises inside a bare TaskGroup in the lifespan takes the whole server down. Here it is logged, counted and
started again after a pause that doubles up to a bound; only cancellation ends it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0

_log = logging.getLogger(__name__)


async def supervised(name: str, loop: Callable[[], Awaitable[None]], *, on_failure: Callable[[str], None]) -> None:
    """Run ``loop`` for ever: restart it when it raises or returns. ``on_failure`` receives its name each time."""
    pause_s = _FIRST_PAUSE_S
    clock = asyncio.get_running_loop().time
    while True:
        started_s = clock()
        try:
            await loop()
        except Exception:  # noqa: BLE001 - a loop may fail in any way and must still come back
            _log.exception("background loop %s failed; it starts again in %.1f s", name, pause_s)
        else:
            _log.error("background loop %s ended; it starts again in %.1f s", name, pause_s)
        on_failure(name)
        if clock() - started_s > _LONGEST_PAUSE_S:
            pause_s = _FIRST_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


async def until_one_ends(*work: Coroutine[Any, Any, None]) -> None:
    """Run them together until one ends or raises, cancel the others, and raise what it raised.

    A ``TaskGroup`` would do it but for this: when its tasks fail while it is being cancelled, it raises what they
    raised, and the cancellation is lost; Python 3.11 does not show whether there was one.
    """
    tasks = [asyncio.create_task(each) for each in work]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()


@asynccontextmanager
async def running(
    loops: Mapping[str, Callable[[], Awaitable[None]]], *, on_failure: Callable[[str], None]
) -> AsyncIterator[None]:
    """Run all loops while the block runs; at its end cancel them and wait until they are gone."""
    tasks = [
        asyncio.create_task(supervised(name, loop, on_failure=on_failure), name=name) for name, loop in loops.items()
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
