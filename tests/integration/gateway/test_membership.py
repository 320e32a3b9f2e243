"""Instances come, go and drain while requests run."""

import asyncio
import json
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tests.support.admin import ADMIN_KEY, Admin
from tests.support.dns_server import dns_server
from tests.support.fleet import CHAT, chat, script
from tests.support.kubernetes_api import KubernetesApi, endpoint
from tests.support.running_gateway import RunningGateway, eventually, running_gateway
from tests.support.scripted_engine import ScriptedEngine


async def members(gateway: RunningGateway) -> set[str]:
    async with gateway.get("/readyz") as answer:
        return set((await answer.json())["instances"])


async def has(gateway: RunningGateway, *names: str) -> None:
    async def there() -> bool:
        return await members(gateway) == set(names)

    await eventually(there)


async def has_problem(gateway: RunningGateway, text: str) -> None:
    """Wait until the problem of a discovery contains this text; "" is none."""

    async def found() -> bool:
        problems = (await Admin(gateway).ok("GET", "/status"))["problems"]
        shown = "".join(each["message"] for each in problems if each["kind"] == "discovery")
        return text in shown if text else not shown

    await eventually(found)


async def test_an_instance_that_is_taken_out_of_the_file_finishes_its_streams_and_gets_nothing_new(
    tmp_path: Path,
) -> None:
    path = tmp_path / "instances.yaml"
    async with AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(ScriptedEngine().started()) for _ in range(2)]
        both = [{"id": "a", "url": a.url}, {"id": "b", "url": b.url}]
        path.write_text(json.dumps(both))
        gateway = await stack.enter_async_context(
            running_gateway(tmp_path, discovery_file=path, discovery_interval_s=0.05, routing_policy="round_robin")
        )
        await gateway.usable(2)
        slow = script(chunks=40, chunk_s=0.05)
        streams = [asyncio.create_task(_stream(gateway, slow)) for _ in range(4)]
        await eventually(lambda: (a.active, b.active) == (2, 2))
        path.write_text(json.dumps(both[1:]))
        await gateway.usable(1)
        assert await members(gateway) == {"a", "b"}
        served = len(a.requests)
        for _ in range(6):
            async with gateway.post(CHAT, chat()) as answer:
                assert (answer.status, answer.headers["x-kvgate-instance"]) == (200, "b")
        assert len(a.requests) == served
        assert [text.count("[DONE]") for text in await asyncio.gather(*streams)] == [1] * 4
        await has(gateway, "b")
        async with gateway.get("/metrics") as answer:
            assert 'instance="a"' not in await answer.text()


async def test_an_empty_file_drains_nobody_and_a_list_that_lost_most_of_them_is_believed_after_a_while(
    tmp_path: Path,
) -> None:
    path = tmp_path / "instances.yaml"
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine().started()) for _ in range(4)]
        named = [{"id": f"e{number}", "url": engine.url} for number, engine in enumerate(engines)]
        path.write_text(json.dumps(named[:3]))
        settings = {"discovery_file": path, "discovery_interval_s": 0.05, "admin_key": ADMIN_KEY}
        patient = await stack.enter_async_context(running_gateway(tmp_path / "1", discovery_loss_s=3600, **settings))
        quick = await stack.enter_async_context(running_gateway(tmp_path / "2", discovery_loss_s=1.0, **settings))
        for gateway in (patient, quick):
            await gateway.usable(3)
        path.write_text("")
        path.write_text(json.dumps([named[0], named[3]]))
        await has(quick, "e0", "e3")
        await has(patient, "e0", "e1", "e2", "e3")  # one that is new is taken in at once
        [problem] = (await Admin(patient).ok("GET", "/status"))["problems"]
        assert problem["kind"] == "discovery"
        assert "no longer names 2 of 3 instances (e1, e2)" in problem["message"]
        path.write_text("[]")
        await has(quick)
        path.write_text(json.dumps(named))

        async def no_problem() -> bool:
            return not (await Admin(patient).ok("GET", "/status"))["problems"]

        await eventually(no_problem)
        await patient.usable(4)
        await quick.usable(4)


async def test_small_losses_within_the_window_add_up(tmp_path: Path) -> None:
    path = tmp_path / "instances.yaml"
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine().started()) for _ in range(4)]
        named = [{"id": f"e{number}", "url": engine.url} for number, engine in enumerate(engines)]
        path.write_text(json.dumps(named))
        settings = {"discovery_file": path, "discovery_interval_s": 0.05, "admin_key": ADMIN_KEY}
        gateway = await stack.enter_async_context(running_gateway(tmp_path / "1", discovery_loss_s=3600, **settings))
        await gateway.usable(4)
        path.write_text(json.dumps(named[:2]))
        await has(gateway, "e0", "e1")
        path.write_text(json.dumps(named[:1]))
        await has_problem(gateway, "no longer names 3 of 4 instances (e1, e2, e3); the present instances stay")
        await gateway.usable(2)
        path.write_text(json.dumps(named))
        await gateway.usable(4)
        await has_problem(gateway, "")


async def test_new_urls_for_most_instances_are_accepted_after_a_while(tmp_path: Path) -> None:
    path = tmp_path / "instances.yaml"
    async with AsyncExitStack() as stack:
        old = [await stack.enter_async_context(ScriptedEngine().started()) for _ in range(3)]
        new = [await stack.enter_async_context(ScriptedEngine().started()) for _ in range(3)]
        path.write_text(json.dumps([{"id": f"e{n}", "url": each.url} for n, each in enumerate(old)]))
        settings = {"discovery_file": path, "discovery_interval_s": 0.05, "admin_key": ADMIN_KEY}
        patient = await stack.enter_async_context(running_gateway(tmp_path / "1", discovery_loss_s=3600, **settings))
        quick = await stack.enter_async_context(running_gateway(tmp_path / "2", discovery_loss_s=0.5, **settings))
        for gateway in (patient, quick):
            await gateway.usable(3)
        path.write_text(json.dumps([{"id": f"e{n}", "url": each.url} for n, each in enumerate(new)]))
        await has_problem(
            patient, "no longer names 3 of 3 instances (e0, e1, e2); it names another URL for e0, e1, e2; the present"
        )

        async def urls(gateway: RunningGateway) -> set[str]:
            return {each["url"] for each in (await Admin(gateway).ok("GET", "/instances"))["data"]}

        async def moved() -> bool:
            return await urls(quick) == {each.url for each in new}

        await eventually(moved)
        await quick.usable(3)
        await has_problem(quick, "")
        assert await urls(patient) == {each.url for each in old}
        await patient.usable(3)


async def test_requests_go_on_without_a_failure_while_the_whole_fleet_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "instances.yaml"
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine().started()) for _ in range(4)]
        named = [{"id": f"e{number}", "url": engine.url} for number, engine in enumerate(engines)]
        path.write_text(json.dumps(named[:2]))
        gateway = await stack.enter_async_context(
            running_gateway(tmp_path, discovery_file=path, discovery_interval_s=0.05)
        )
        await gateway.usable(2)
        stop = asyncio.Event()
        statuses: list[int] = []

        async def client() -> None:
            while not stop.is_set():
                async with gateway.post(CHAT, chat(), x_script=script(ttft_s=0.02)) as answer:
                    await answer.read()
                    statuses.append(answer.status)

        clients = [asyncio.create_task(client()) for _ in range(8)]
        path.write_text(json.dumps(named))
        await gateway.usable(4)
        path.write_text(json.dumps(named[2:]))
        await has(gateway, "e2", "e3")
        done = len(statuses)
        await eventually(lambda: len(statuses) > done + 20)
        stop.set()
        await asyncio.gather(*clients)
        assert set(statuses) == {200}


async def test_dns_names_instances(tmp_path: Path) -> None:
    async with ScriptedEngine().started() as engine:
        with dns_server(f"_http._tcp.pool.test. 0 SRV 1 1 {engine.port} localhost.") as zone:
            async with running_gateway(
                tmp_path,
                discovery_dns=[{"name": "_http._tcp.pool.test", "record": "SRV"}],
                discovery_dns_servers=[zone.address],
                discovery_interval_s=0.2,
                discovery_loss_s=0.2,
            ) as gateway:
                await gateway.usable(1)
                async with gateway.post(CHAT, chat()) as answer:
                    assert (answer.status, answer.headers["x-kvgate-instance"]) == (200, f"localhost-{engine.port}")
                zone.broken = True
                asked = zone.asked
                await eventually(lambda: zone.asked > asked + 1)
                await gateway.usable(1)
                zone.broken, zone.lines = False, []
                await has(gateway)


async def test_srv_answers_that_shrink_at_once_are_believed_after_a_while_and_steps_of_half_at_once(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine().started()) for _ in range(4)]
        lines = [f"_http._tcp.pool.test. 0 SRV 1 1 {engine.port} localhost." for engine in engines]
        names = [f"localhost-{engine.port}" for engine in engines]
        zone = stack.enter_context(dns_server(*lines))
        settings: dict[str, Any] = {
            "discovery_dns": [{"name": "_http._tcp.pool.test", "record": "SRV"}],
            "discovery_dns_servers": [zone.address],
            "discovery_interval_s": 0.1,
            "admin_key": ADMIN_KEY,
        }
        patient = await stack.enter_async_context(running_gateway(tmp_path / "1", discovery_loss_s=3600, **settings))
        quick = await stack.enter_async_context(running_gateway(tmp_path / "2", discovery_loss_s=1.0, **settings))
        for gateway in (patient, quick):
            await gateway.usable(4)
        zone.lines = lines[:1]
        await has_problem(patient, "no longer names 3 of 4 instances")
        await has(quick, *names[:1])
        await has(patient, *names)
        zone.lines = lines[:2]  # half of those that the patient one has
        await has(patient, *names[:2])
        await has_problem(patient, "")


async def test_a_place_that_can_not_be_read_is_a_problem_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "instances.yaml"
    async with ScriptedEngine().started() as engine:
        whole = json.dumps([{"id": "a", "url": engine.url}])
        path.write_text(whole)
        settings = {"discovery_file": path, "discovery_interval_s": 0.05, "discovery_loss_s": 0.05}
        async with running_gateway(tmp_path / "1", admin_key=ADMIN_KEY, **settings) as gateway:
            await gateway.usable(1)
            path.write_text(whole[:-20])  # as it is while somebody writes it
            await has_problem(gateway, "is not YAML")
            path.unlink()
            await has_problem(
                gateway, "can't be read: No such file or directory; the instances named there before stay"
            )
            path.mkdir()
            await has_problem(gateway, "is a directory; it must be a regular file")
            await gateway.usable(1)
            path.rmdir()
            os.mkfifo(path)
            await has_problem(gateway, "is a FIFO; it must be a regular file; the instances named there before stay")
            await gateway.usable(1)
            (tmp_path / "next").write_text(whole)
            (tmp_path / "next").replace(path)
            await has_problem(gateway, "")


async def test_kubernetes_names_instances_and_a_terminating_pod_drains(tmp_path: Path) -> None:
    async with KubernetesApi().started() as api, ScriptedEngine().started() as engine:
        token = tmp_path / "token"
        token.write_text(api.token)
        cluster = {
            "namespace": "llm",
            "service": "engines",
            "port": "http",
            "api_url": api.url,
            "token_file": token,
            "ca_file": None,
        }
        await api.put("x", endpoint("127.0.0.1", "engine-0"), port=engine.port)
        async with running_gateway(tmp_path, discovery_kubernetes=cluster, discovery_loss_s=0.2) as gateway:
            await gateway.usable(1)
            stream = asyncio.create_task(_stream(gateway, script(chunks=20, chunk_s=0.05)))
            await eventually(lambda: engine.active == 1)
            await api.put("x", endpoint("127.0.0.1", "engine-0", terminating=True), port=engine.port)
            await gateway.usable(0)
            assert await members(gateway) == {"engine-0"}
            async with gateway.post(CHAT, chat()) as answer:
                assert answer.status == 503
            assert "[DONE]" in await stream
            await has(gateway)


async def test_discovered_addresses_outside_the_allowed_networks_are_not_taken_in(tmp_path: Path) -> None:
    path = tmp_path / "instances.yaml"
    async with ScriptedEngine().started() as engine:
        path.write_text(
            json.dumps([{"id": "inside", "url": engine.url}, {"id": "metadata", "url": "http://169.254.169.254"}])
        )
        async with running_gateway(tmp_path, discovery_file=path, discovery_interval_s=0.05) as gateway:
            await gateway.usable(1)
            assert await members(gateway) == {"inside"}


async def _stream(gateway: RunningGateway, how: str) -> str:
    async with gateway.post(CHAT, chat(stream=True), x_script=how) as answer:
        assert answer.status == 200
        text: str = await answer.text()
        return text
