"""Several worker processes on one address, with shared quotas and one scrape; and what survives when one is killed."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from dashboards.panel import Proof
from gateway.state import Kind
from gateway.telemetry.siblings import merged
from tests.integration.gateway.test_process import listening, refused, start
from tests.support.databases import redis_server
from tests.support.fleet import CHAT, chat, script
from tests.support.panels import queries_of, until_all_find
from tests.support.people import put
from tests.support.prometheus import Target, running_prometheus
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import ScriptedEngine


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with redis_server() as server:
        yield f"redis://127.0.0.1:{server.port}/0"


class Crew:
    """A gateway of several workers, and a client of it that opens a connection for each request."""

    def __init__(self, url: str, process: asyncio.subprocess.Process, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.process = process
        self.session = session

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    async def status(self, path: str = "/readyz") -> int:
        try:
            async with self.session.get(self.url + path) as answer:
                await answer.read()
                return answer.status
        except aiohttp.ClientError:
            return 0

    async def chat(self) -> int:
        async with self.session.post(self.url + CHAT, json=chat(), headers={"authorization": "Bearer k"}) as answer:
            await answer.read()
            return answer.status

    async def all_ready(self, count: int) -> None:
        """Wait until every worker answers its siblings and all find their instance usable."""

        async def up() -> bool:
            try:
                async with self.session.get(self.url + "/metrics") as answer:
                    text = await answer.text()
            except aiohttp.ClientError:
                return False
            ready = 'kvgate_instance_state{worker="%d",instance="a",state="healthy"} 1.0'
            return all(ready % number in text for number in range(count))

        await eventually(up, 90.0)


@asynccontextmanager
async def crew(tmp_path: Path, redis_url: str, count: int, key: str = "", **settings: str) -> AsyncIterator[Crew]:
    async with ScriptedEngine().started() as engine:
        process = await start(
            tmp_path,
            "--workers",
            str(count),
            KVGATE_INSTANCES=f'[{{"id": "a", "url": "{engine.url}"}}]',
            KVGATE_API_KEYS='[{"key": "k", "tenant": "acme"}]',
            KVGATE_REDIS_URL=redis_url,
            **settings,
        )
        try:
            url = await listening(process)
            assert process.stderr is not None
            drained = asyncio.create_task(process.stderr.read())
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            headers = {"authorization": f"Bearer {key}"} if key else {}
            async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
                running = Crew(url, process, session)
                await running.all_ready(count)
                yield running
            children = running.workers() if process.returncode is None else []
            if process.returncode is None:
                process.terminate()
                assert await asyncio.wait_for(process.wait(), 60) == 0
            await drained
            assert not [each for each in children if each.is_running()]
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_workers_share_quotas_and_one_that_is_killed_comes_back(tmp_path: Path, redis_url: str) -> None:
    await put(tmp_path, Kind.QUOTA, "acme", requests_per_min=10)
    async with crew(tmp_path, redis_url, 3) as gateway:
        assert len(gateway.workers()) == 3
        assert Counter(await asyncio.gather(*(gateway.chat() for _ in range(100)))) == {200: 10, 429: 90}
        victim = gateway.workers()[0]
        os.kill(victim.pid, signal.SIGKILL)
        await eventually(lambda: len(gateway.workers()) == 3 and victim not in gateway.workers(), 60.0)
        await gateway.all_ready(3)
        assert Counter(await asyncio.gather(*(gateway.chat() for _ in range(20)))) == {429: 20}  # nothing was forgotten
        await asyncio.to_thread(_panels_show_workers, gateway.url, tmp_path)


async def test_a_worker_that_is_restarted_ends_its_streams_with_an_error_event(tmp_path: Path, redis_url: str) -> None:
    async with crew(tmp_path, redis_url, 2, KVGATE_SHUTDOWN_GRACE_S="0.5") as gateway:
        before = gateway.workers()
        headers = {"authorization": "Bearer k", "x-script": script(chunks=4, stall_after=2)}
        async with gateway.session.post(gateway.url + CHAT, json=chat(stream=True), headers=headers) as answer:
            begun = await answer.content.readany()
            for each in before:
                each.send_signal(signal.SIGTERM)
            events = (begun + await answer.content.read()).decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert '"code":"shutting_down"' in events[-3]
        await eventually(lambda: len(gateway.workers()) == 2 and not {*before} & {*gateway.workers()}, 60.0)
        await gateway.all_ready(2)


async def test_a_scrape_with_the_metrics_key_has_the_series_of_all_workers(tmp_path: Path, redis_url: str) -> None:
    key = "metrics-key-of-prometheus"
    settings = {"KVGATE_OPERATOR_ACCESS": "key", "KVGATE_METRICS_KEY": key}
    async with (
        crew(tmp_path, redis_url, 2, key, **settings) as gateway,  # it waits for the series of both
        gateway.session.get(gateway.url + "/metrics", headers={"authorization": "Bearer k"}) as answer,
    ):
        assert answer.status == 401


async def test_from_a_stop_on_new_connections_are_served_or_refused_while_a_stream_ends(
    tmp_path: Path, redis_url: str
) -> None:
    async with crew(tmp_path, redis_url, 2) as gateway:
        long = {"authorization": "Bearer k", "x-script": script(chunks=40, chunk_s=0.1)}
        async with gateway.session.post(gateway.url + CHAT, json=chat(stream=True), headers=long) as stream:
            assert b"tok0" in await stream.content.readany()
            gateway.process.terminate()
            seen: list[str] = []
            rest = asyncio.create_task(stream.content.read())
            while not rest.done():
                try:
                    seen.append(str(await gateway.chat()))
                except aiohttp.ClientConnectorError as error:
                    seen.append(type(error.os_error).__name__)
            assert (await rest).endswith(b"data: [DONE]\n\n")
        assert set(seen) <= {"200", "ConnectionRefusedError"}
        assert seen[-1] == "ConnectionRefusedError"
        assert await asyncio.wait_for(gateway.process.wait(), 60) == 0


async def test_a_worker_that_hangs_at_a_stop_does_not_keep_new_connections_waiting(
    tmp_path: Path, redis_url: str
) -> None:
    async with crew(tmp_path, redis_url, 2, KVGATE_SHUTDOWN_GRACE_S="600") as gateway:
        hanging = gateway.workers()[0]
        hanging.suspend()
        gateway.process.terminate()
        seen = "200"
        while seen == "200":
            try:
                async with gateway.session.get(gateway.url + "/healthz") as answer:
                    seen = str(answer.status)
            except aiohttp.ClientConnectorError as error:
                seen = type(error.os_error).__name__
        assert seen == "ConnectionRefusedError"
        assert hanging.status() == psutil.STATUS_STOPPED
        hanging.resume()
        assert await asyncio.wait_for(gateway.process.wait(), 60) == 0


async def test_workers_end_with_the_process_that_started_them(tmp_path: Path, redis_url: str) -> None:
    async with crew(tmp_path, redis_url, 2) as gateway:
        workers = gateway.workers()
        gateway.process.kill()
        await gateway.process.wait()
        await eventually(lambda: not any(_alive(each) for each in workers), 60.0)


def _panels_show_workers(url: str, folder: Path) -> None:
    target = Target("kvgate-gateway", url.removeprefix("http://"), {"gateway": "g"})
    with running_prometheus(folder, [target]) as prometheus:
        until_all_find(prometheus, queries_of(Proof.WORKERS))


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_several_workers_without_shared_quotas_do_not_start(tmp_path: Path) -> None:
    code, said = await refused(await start(tmp_path, "--workers", "2"))
    assert code == 2
    assert "set redis_url" in said


async def test_redis_that_is_not_there_is_said(tmp_path: Path) -> None:
    code, said = await refused(await start(tmp_path, KVGATE_REDIS_URL="redis://127.0.0.1:1/0"))
    assert code == 2
    assert "redis_url: can't be used for quotas" in said
    assert "Traceback" not in said


def test_series_of_several_workers_are_told_apart() -> None:
    first = '# HELP a A.\n# TYPE a counter\na_total{x="}"} 1.0\n# HELP b B.\n# TYPE b gauge\nb 2.0\n'
    second = "# HELP b B.\n# TYPE b gauge\nb 3.0\n"
    assert merged({0: first, 1: second, 2: None}).splitlines() == [
        "# HELP a A.",
        "# TYPE a counter",
        'a_total{worker="0",x="}"} 1.0',
        "# HELP b B.",
        "# TYPE b gauge",
        'b{worker="0"} 2.0',
        'b{worker="1"} 3.0',
        "# HELP kvgate_worker_up 1 for each worker process that answered this scrape.",
        "# TYPE kvgate_worker_up gauge",
        'kvgate_worker_up{worker="0"} 1',
        'kvgate_worker_up{worker="1"} 1',
        'kvgate_worker_up{worker="2"} 0',
    ]


def test_openmetrics_of_several_workers_keeps_examples_and_ends_once() -> None:
    first = (
        "# HELP w_seconds W.\n# TYPE w_seconds histogram\n# UNIT w_seconds seconds\n"
        'w_seconds_bucket{le="1.0"} 1.0 # {trace_id="ab"} 0.5 1700000000.5\n# EOF\n'
    )
    second = (
        "# HELP w_seconds W.\n# TYPE w_seconds histogram\n# UNIT w_seconds seconds\n"
        'w_seconds_bucket{le="1.0",x="\\"}"} 2.0\n# EOF\n'
    )
    lines = merged({0: first, 1: second}).splitlines()
    assert lines[:5] == [
        "# HELP w_seconds W.",
        "# TYPE w_seconds histogram",
        "# UNIT w_seconds seconds",
        'w_seconds_bucket{worker="0",le="1.0"} 1.0 # {trace_id="ab"} 0.5 1700000000.5',
        'w_seconds_bucket{worker="1",le="1.0",x="\\"}"} 2.0',
    ]
    assert lines[-1] == "# EOF"
    assert lines.count("# EOF") == 1
