"""What a test's server has accepted it closes, at whatever moment it stops."""

import asyncio
import gc
import socket
import warnings

import pytest
from aiohttp import web

from lab.conformance.listening import Listening


@pytest.mark.parametrize("turns", range(6))
def test_connections_that_are_just_being_accepted_are_closed(turns: int) -> None:
    async def stopped_early() -> None:
        listening = await Listening.start(web.Application())
        address = ("127.0.0.1", int(listening.url.rpartition(":")[2]))
        for _ in range(3):
            socket.create_connection(address).close()
        for _ in range(turns):
            await asyncio.sleep(0)
        await listening.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)

    gc.collect()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with asyncio.Runner() as runner:
            runner.run(stopped_early())
        gc.collect()
    assert [str(each.message) for each in told] == []


async def test_a_port_that_another_has_is_an_error_and_leaves_nothing() -> None:
    first = await Listening.start(web.Application())
    try:
        with pytest.raises(OSError, match="in use"):
            await Listening.start(web.Application(), int(first.url.rpartition(":")[2]))
    finally:
        await first.stop()
    gc.collect()
