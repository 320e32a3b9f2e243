"""Nobody waits for a handle, and the door keeps the number of requests finite."""

import asyncio
import json
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest

from engines.lmdeploy.http.concurrency_limit import ConcurrencyLimitMiddleware
from engines.lmdeploy.schedule import handles
from engines.lmdeploy.schedule.handles import (
    HandlePool,
    build_request_handle_pool,
    instance_pool_instance,
    sender_async_recv,
)


async def test_a_handle_is_there_at_once_and_is_used_again() -> None:
    made: list[object] = []

    def make() -> object:
        made.append(object())
        return made[-1]

    pool = HandlePool(make)
    out = [await pool.get() for _ in range(500)]
    assert (pool.num_dispatched, len(made)) == (500, 500)
    for handle in out:
        pool.put(handle)
    pool.put(None)
    again = await pool.get()
    assert again in out
    assert (pool.num_dispatched, len(made)) == (1, 500)
    pool.clear()
    assert await pool.get() not in out


class Engine:
    made = 0

    def create_instance(self) -> str:
        self.made += 1
        return f"handle {self.made}"


Engine.__module__ = "lmdeploy.pytorch.engine.engine"


class Manager:
    request_handle_pool: Any = None


def test_only_lmdeploys_pytorch_engine_gets_it() -> None:
    calls: list[int] = []
    build = build_request_handle_pool(lambda _self, _engine, size: calls.append(size))
    manager = Manager()
    build(manager, object(), 3)
    assert (calls, manager.request_handle_pool) == ([3], None)
    build(manager, Engine(), 3)
    assert isinstance(manager.request_handle_pool, HandlePool)
    assert calls == [3]


class InstancePool:
    def __init__(self) -> None:
        self.engine = Engine()

    instance = instance_pool_instance(lambda _: None)


async def test_a_cancellation_in_the_engine_process_waits_behind_nobody() -> None:
    pool = InstancePool()
    release = asyncio.Event()

    async def stream() -> None:
        async with pool.instance():
            await release.wait()

    streams = [asyncio.create_task(stream()) for _ in range(100)]
    await asyncio.sleep(0)
    async with pool.instance() as handle:
        assert handle == "handle 101"
    streams[0].cancel()
    release.set()
    await asyncio.gather(*streams, return_exceptions=True)
    for _ in range(101):
        async with pool.instance():
            pass
    assert pool.engine.made == 101, "a handle was lost"


async def test_one_more_than_the_bound_is_refused_at_once_and_leaves_no_trace() -> None:
    release = asyncio.Event()
    failing = False

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        await release.wait()
        if failing:
            raise ZeroDivisionError

    door = ConcurrencyLimitMiddleware(app, bound=2)

    def request(path: str = "/v1/chat/completions") -> tuple[Callable[[], Any], list[MutableMapping[str, Any]]]:
        sent: list[MutableMapping[str, Any]] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        async def receive() -> MutableMapping[str, Any]:
            raise AssertionError("the body of a refused request was read")

        return lambda: door({"type": "http", "path": path, "headers": []}, receive, send), sent

    inside = [asyncio.create_task(request()[0]()) for _ in range(2)]
    await asyncio.sleep(0)
    more, sent = request()
    await more()
    assert sent[0]["status"] == 429
    assert dict(sent[0]["headers"])[b"retry-after"] == b"1"
    error = json.loads(sent[1]["body"])["error"]
    assert (error["code"], "2 requests" in error["message"]) == ("engine_saturated", True)
    health = asyncio.create_task(request("/health")[0]())
    await asyncio.sleep(0)
    assert (door.inside, door.refused) == (2, 1)
    inside[0].cancel()
    await asyncio.gather(inside[0], return_exceptions=True)
    assert door.inside == 1
    failing = True
    release.set()
    await asyncio.gather(*inside, health, return_exceptions=True)
    assert door.inside == 0


class Answer:
    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.type = "unset"


class Sender:
    """Stands where LMDeploy's ``RequestSender`` does."""

    def __init__(self) -> None:
        self.looked = 0
        self.alive = True

    def is_loop_alive(self) -> bool:
        self.looked += 1
        return self.alive

    async_recv = sender_async_recv(lambda _: None)


async def test_an_answer_that_is_there_is_given_at_once_and_can_be_waited_for_again() -> None:
    sender, answer = Sender(), Answer()
    answer.event.set()
    assert await sender.async_recv(answer, wait_main=True) is answer
    assert (answer.event.is_set(), sender.looked, answer.type) == (False, 0, "unset")


async def test_the_tokens_of_a_step_reach_all_streams_at_once() -> None:
    from lmdeploy.messages import ResponseType
    from lmdeploy.pytorch.engine.request import RequestManager, RequestSender, Response

    async def main_loop() -> None:
        await asyncio.Event().wait()

    manager = RequestManager()
    manager.set_main_loop_func(main_loop)
    manager.create_loop_task()
    sender = manager.build_sender()
    receive = sender_async_recv(RequestSender.async_recv)
    answers = [Response(type=ResponseType.SUCCESS, sender_id=0, event=asyncio.Event()) for _ in range(64)]
    try:
        for _ in range(3):
            streams = [asyncio.create_task(receive(sender, answer, wait_main=True)) for answer in answers]
            await _turns_of_the_loop(3)
            assert not any(stream.done() for stream in streams)
            for answer in answers:
                manager.response(answer)
            await _turns_of_the_loop(3)
            assert all(stream.done() for stream in streams)
    finally:
        tasks = [manager._loop_task, manager._sender_wait_task]
        manager.stop_loop()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _turns_of_the_loop(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_who_waits_long_looks_ever_more_seldom_and_hears_of_a_loop_that_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    class NoTime:
        def __init__(self, pause_s: float) -> None:
            pauses.append(pause_s)

        async def __aenter__(self) -> None:
            sender.alive = len(pauses) < 8
            raise TimeoutError

        async def __aexit__(self, *_: object) -> None:
            raise AssertionError

    sender, answer = Sender(), Answer()
    monkeypatch.setattr(handles.asyncio, "timeout", NoTime)
    from lmdeploy.messages import ResponseType

    assert await sender.async_recv(answer) is answer
    assert pauses == [1, 2, 4, 8, 16, 32, 32, 32]
    assert answer.type is ResponseType.ENGINE_STOP_ERROR
