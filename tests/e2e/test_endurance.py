"""A gateway process under load of all kinds has nothing left of it afterwards.

``KVGATE_TEST_ENDURANCE_S`` says how long the long run of the slow lane takes, half an hour by default.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.endurance import DEADLINE_S, Gateway, Held, Mix, Shaky, engines, gateway_process, many_files
from tests.support.fleet import CHAT, chat, script
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import ScriptedEngine

LIMITS = {"first_byte_timeout_s": 3, "idle_timeout_s": 3, "health_timeout_s": 2}
MIB = 1 << 20
Record = Callable[[str, object], None]


async def rested(gateway: Gateway, fleet: list[ScriptedEngine]) -> Held:
    """Return what it holds once all is over and idle connections have been dropped."""
    await gateway.at_rest(fleet)
    await asyncio.sleep(6)
    return await gateway.held()


async def mixed(folder: Path, *, seconds: float, clients: int, record: Record) -> None:
    """Warm up, run for ``seconds`` with an instance flapping, and look at what is left."""
    shaky = Shaky()
    await shaky.start()
    try:
        async with engines("a", "b") as steady:
            fleet = {**steady, "c": shaky.engine}
            async with gateway_process(folder, fleet, **LIMITS) as gateway:
                mix = Mix(gateway)
                await mix.run(clients=clients, seconds=max(4.0, seconds / 10))
                before = await rested(gateway, [*fleet.values()])
                flapping = asyncio.create_task(shaky.flap(3.0))
                try:
                    await mix.run(clients=clients, seconds=seconds)
                finally:
                    flapping.cancel()
                    await asyncio.gather(flapping, return_exceptions=True)
                after = await rested(gateway, [*fleet.values()])
    finally:
        await shaky.stop()
    record("ends", dict(mix.tally.ends))
    record("before", str(before))
    record("after", str(after))
    assert mix.tally.odd == []
    assert mix.tally.late == 0
    assert mix.tally.ends["200"] > mix.tally.ends["left"] > 0
    assert after.tasks <= before.tasks + 3
    assert after.files <= before.files + 5
    assert after.rss_bytes <= before.rss_bytes * 1.15 + 24 * MIB


async def test_a_short_mix_of_all_leaves_no_task_no_file_and_no_count_behind(
    tmp_path: Path, record_property: Record
) -> None:
    await mixed(tmp_path, seconds=8, clients=16, record=record_property)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
async def test_a_long_mix_of_all_leaves_no_task_no_file_and_no_count_behind(
    tmp_path: Path, record_property: Record
) -> None:
    seconds = float(os.environ.get("KVGATE_TEST_ENDURANCE_S", "1800"))
    await mixed(tmp_path, seconds=seconds, clients=48, record=record_property)


async def held_open(folder: Path, *, streams: int, record: Record) -> None:
    """Open so many streams, ask a hundred things beside them, and close them all."""
    async with engines("a", "b", "c") as fleet, gateway_process(folder, fleet) as gateway:
        before = await rested(gateway, [*fleet.values()])
        release = asyncio.Event()
        opened = 0

        async def hold() -> None:
            nonlocal opened
            how = script(chunks=3, chunk_s=600.0)
            async with gateway.session.post(
                gateway.url + CHAT, json=chat(stream=True), headers={"x-script": how}
            ) as answer:
                assert answer.status == 200, await answer.text()
                assert await answer.content.readany()
                opened += 1
                await release.wait()

        async with asyncio.TaskGroup() as group:
            for number in range(streams):
                group.create_task(hold())
                if number % 50 == 0:
                    await asyncio.sleep(0.05)
            await eventually(lambda: opened == streams, 4 * DEADLINE_S)
            during = await gateway.held()
            assert sum(engine.active for engine in fleet.values()) == streams
            statuses = [await plain(gateway) for _ in range(100)]
            release.set()
        after = await rested(gateway, [*fleet.values()])
    record("streams", streams)
    record("held", f"before {before}, during {during}, after {after}")
    assert statuses == [200] * 100
    assert during.rss_bytes - before.rss_bytes < streams * 160 * 1024 + 32 * MIB
    assert after.tasks <= before.tasks + 3
    assert after.files <= before.files + 5


async def plain(gateway: Gateway) -> int:
    async with (
        asyncio.timeout(DEADLINE_S),
        gateway.session.post(gateway.url + CHAT, json=chat()) as answer,
    ):
        await answer.read()
        return answer.status


async def test_two_hundred_open_streams_keep_nobody_out_and_leave_nothing(
    tmp_path: Path, record_property: Record
) -> None:
    await held_open(tmp_path, streams=200, record=record_property)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_two_thousand_open_streams_keep_nobody_out_and_leave_nothing(
    tmp_path: Path, record_property: Record
) -> None:
    with many_files() as files:
        streams = min(2000, (files - 500) // 5)
        await held_open(tmp_path, streams=streams, record=record_property)
