"""Calls to an instance whose kept connection has died."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from gateway.fleet import InstanceControl, InstanceControlError, Policy
from gateway.fleet.policies import PolicySwap
from gateway.registry import Instance, InstanceSpec, Registry
from gateway.registry.checks import CheckRules
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.policy_control import Fence
from tests.support.control_client import control_client
from tests.support.running_gateway import eventually

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Dropping:
    """Answers the first request of each connection, and closes it at the second one without a word."""

    def __init__(self, *, deaf: bool = False) -> None:
        self.requests = 0
        self.connections = 0
        self.open = 0
        self._deaf = deaf

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        with suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
            if not self._deaf:
                writer.write(ANSWER)
                await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
        writer.close()
        self.open -= 1


@asynccontextmanager
async def calling(server: Dropping) -> AsyncIterator[tuple[InstanceControl, Instance]]:
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        registry = Registry([InstanceSpec(id=InstanceId("a"), url=url)], rules=CheckRules(unhealthy_after=3))
        async with control_client() as client:
            yield InstanceControl(client, timeout_s=20), registry.get(InstanceId("a"))
        await eventually(lambda: server.open == 0)


@pytest.mark.parametrize("method", ["GET", "PUT", "POST"])
async def test_it_is_asked_again_on_a_new_connection(method: str) -> None:
    server = Dropping()
    async with calling(server) as (control, instance):
        for _ in range(2):
            assert await control.call(instance, method, "/kv/v1/policy") == b"{}"
        assert (server.connections, server.requests) == (2, 3)


async def test_one_that_never_answers_may_have_read_it() -> None:
    async with calling(Dropping(deaf=True)) as (control, instance):
        with pytest.raises(InstanceControlError) as failure:
            await control.call(instance, "POST", "/kv/v1/policy")
        assert (failure.value.status, failure.value.sure) == (None, False)


async def test_a_policy_is_sent_to_an_instance_that_left_while_it_was_changed() -> None:
    server = Dropping()
    async with calling(server) as (control, instance):
        swap = PolicySwap(control)
        swap.forget(instance.id)
        await swap.send(instance, Policy(kind="eviction", name="lru"), Fence("store", 1))
        assert server.requests == 1
