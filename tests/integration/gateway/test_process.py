"""The gateway as a process: how it starts, refuses to, and stops; and what its log holds."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import aiohttp
import psutil
import pytest

from gateway.fingerprint import load_tokenizer
from gateway.settings import setting_fields
from tests.support.fleet import CHAT, chat, script
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import ScriptedEngine
from tests.support.tokenizer_kinds import byte_fallback


async def start(tmp_path: Path, *arguments: str, **settings: str) -> Process:
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    named = {"KVGATE_STATE_DIR": str(tmp_path), "KVGATE_PORT": "0", "KVGATE_SHUTDOWN_NOTICE_S": "0"} | settings
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *arguments, env=own | named, stdout=PIPE, stderr=PIPE
    )


async def refused(process: Process) -> tuple[int | None, str]:
    _, said = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, said.decode()


async def listening(process: Process) -> str:
    """Read the log up to the line that says where it listens."""
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while line := (await process.stderr.readline()).decode():
            if found := re.search(r"listening on (http://\S+?)(?:\"|\s|$)", line):
                return found[1]
    raise AssertionError("it ended before it listened")


async def test_a_port_in_use_is_said_with_its_number(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, said = await refused(await start(tmp_path, KVGATE_PORT=port))
    assert code == 3
    assert f"127.0.0.1:{port}" in said
    assert "Traceback" not in said


async def test_wrong_settings_are_said_and_nothing_is_started(tmp_path: Path) -> None:
    path = tmp_path / "kvgate.yaml"
    path.write_text("routing_policy: best\n")
    code, said = await refused(await start(tmp_path, "--config", str(path)))
    assert code == 2
    assert "kvgate.yaml: routing_policy = 'best'" in said
    assert "Traceback" not in said


async def test_the_help_has_every_setting_as_a_variable_of_the_environment(tmp_path: Path) -> None:
    process = await start(tmp_path, "--help")
    said, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    words = said.decode().split()
    assert [name for name in setting_fields() if f"KVGATE_{name.upper()}" not in words] == []
    assert "%%" not in said.decode()


async def test_open_mode_does_not_listen_on_the_network(tmp_path: Path) -> None:
    code, said = await refused(await start(tmp_path, KVGATE_HOST="192.0.2.1"))
    assert code == 2
    assert "not a loopback address" in said


async def test_what_outlasts_the_grace_period_ends_with_an_error_and_the_log_has_no_traceback(tmp_path: Path) -> None:
    async with ScriptedEngine().started() as engine:
        instances = json.dumps([{"id": "a", "url": engine.url}])
        process = await start(tmp_path, KVGATE_INSTANCES=instances, KVGATE_SHUTDOWN_GRACE_S="0.5")
        url = await listening(process)
        async with aiohttp.ClientSession() as session:
            never = asyncio.create_task(_answered(session, url, script(ttft_s=3600)))
            endless = {"x-script": script(chunks=4, stall_after=2)}
            async with session.post(url + CHAT, json=chat(stream=True), headers=endless) as stream:
                assert stream.status == 200  # it waited for the first health check
                begun = await stream.content.readany()
                await eventually(lambda: engine.active == 2)
                process.send_signal(signal.SIGTERM)
                events = (begun + await stream.content.read()).decode().split("\n\n")
            assert await never == (503, "shutting_down")
        _, log = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert events[-2:] == ["data: [DONE]", ""]
    assert '"code":"shutting_down"' in events[-3]
    assert "Traceback" not in log.decode()
    assert " ERROR " not in log.decode()


async def test_a_tokenizer_brings_no_pytorch_into_the_gateway(tmp_path: Path) -> None:
    text = "It's 1234.5 miles, isn't it?"
    folder = byte_fallback(tmp_path / "model")
    process = await start(tmp_path, KVGATE_TOKENIZER=str(folder))
    url = await listening(process)
    async with aiohttp.ClientSession() as session, session.post(url + "/tokenize", json={"prompt": text}) as answer:
        said = await answer.json()
    mapped = {each.path for each in psutil.Process(process.pid).memory_maps()}
    process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(process.communicate(), 60)
    assert said["tokens"] == load_tokenizer(folder).token_ids(text, special=True)
    assert [each for each in mapped if "tokenizers" in each]
    assert [each for each in mapped if "torch" in each] == []


async def _answered(session: aiohttp.ClientSession, url: str, how: str) -> tuple[int, str]:
    async with session.post(url + CHAT, json=chat(), headers={"x-script": how}) as answer:
        return answer.status, (await answer.json())["error"]["code"]


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_says_its_mode_logs_one_line_a_request_without_secrets_and_stops(
    tmp_path: Path, stop: signal.Signals
) -> None:
    async with ScriptedEngine().started() as engine:
        instances = json.dumps([{"id": "a", "url": engine.url}])
        process = await start(
            tmp_path, KVGATE_INSTANCES=instances, KVGATE_LOG_FORMAT="json", KVGATE_HEALTH_INTERVAL_S="0.1"
        )
        url = await listening(process)
        async with aiohttp.ClientSession() as session:
            async with asyncio.timeout(60):
                while True:
                    try:
                        async with session.get(url + "/readyz") as answer:
                            if answer.status == 200:
                                break
                    except aiohttp.ClientConnectionError:
                        pass
                    await asyncio.sleep(0.05)
            said = chat(messages=[{"role": "user", "content": "prompt-hush"}], user="user-hush")
            headers = {"authorization": "Bearer key-hush", "x-request-id": "req-1"}
            async with session.post(url + CHAT, json=said, headers=headers) as answer:
                assert answer.status == 200
        process.send_signal(stop)
        _, log = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    lines = [json.loads(line) for line in log.decode().splitlines()]
    assert any("any API key is accepted" in line["message"] for line in lines)
    assert [line for line in lines if line["logger"] == "httpx2"] == [], "health checks"
    (request,) = [line for line in lines if line["logger"] == "gateway.request"]
    assert request["request_id"] == "req-1"
    assert request["instance"] == "a"
    assert request["status"] == 200
    assert request["completion_tokens"] == 4
    assert "hush" not in log.decode()


async def test_a_half_closed_client_is_answered_and_one_that_left_is_noticed(tmp_path: Path) -> None:
    """With the event loop that the process has."""
    async with ScriptedEngine().started() as engine:
        instances = json.dumps([{"id": "a", "url": engine.url}])
        process = await start(tmp_path, KVGATE_INSTANCES=instances, KVGATE_HEALTH_INTERVAL_S="0.1")
        try:
            host, _, port = (await listening(process)).removeprefix("http://").rpartition(":")
            async with aiohttp.ClientSession() as session:

                async def ready() -> bool:
                    async with session.get(f"http://{host}:{port}/readyz") as answer:
                        return answer.status == 200

                await eventually(ready, 60.0)
            for stream in (False, True):
                for leaves in (False, True):
                    how = json.dumps({"ttft_s": 60 if leaves else 0.5})
                    body = json.dumps(chat(stream=stream)).encode()
                    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nx-script: {how}\r\n"
                    reader, writer = await asyncio.open_connection(host, int(port))
                    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
                    await eventually(lambda: engine.active == 1)
                    aborted = engine.aborted
                    if leaves:
                        writer.close()
                        await writer.wait_closed()
                        await eventually(lambda aborted=aborted: engine.aborted == aborted + 1)
                    else:
                        writer.write_eof()
                        async with asyncio.timeout(30):
                            said = await reader.read()
                        assert b"HTTP/1.1 200 OK" in said
                        assert said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")
                        writer.close()
        finally:
            process.terminate()
            await asyncio.wait_for(process.communicate(), 60)


async def test_without_file_descriptors_it_says_so_once_and_blames_no_instance(tmp_path: Path) -> None:
    async with ScriptedEngine().started() as engine:
        instances = json.dumps([{"id": "a", "url": engine.url}])
        process = await start(tmp_path, KVGATE_INSTANCES=instances, KVGATE_HEALTH_INTERVAL_S="0.1")
        assert process.stderr is not None
        clients: list[socket.socket] = []
        try:
            host, _, port = (await listening(process)).removeprefix("http://").rpartition(":")

            async def ready() -> bool:
                try:
                    async with (
                        aiohttp.ClientSession() as session,
                        session.get(f"http://{host}:{port}/readyz") as answer,
                    ):
                        return answer.status == 200 and not (await answer.json())["problems"]
                except aiohttp.ClientError:
                    return False

            await eventually(ready, 60.0)
            gateway = psutil.Process(process.pid)
            limit = gateway.num_fds() + 20
            gateway.rlimit(psutil.RLIMIT_NOFILE, (limit, limit))
            clients += [socket.create_connection((host, int(port)), timeout=10) for _ in range(30)]
            async with asyncio.timeout(60):
                while b"file descriptors" not in (said := await process.stderr.readline()):
                    assert b"unhealthy" not in said
            assert b"ulimit -n" in said
            for each in clients:
                each.close()
            await eventually(ready, 60.0)
        finally:
            for each in clients:
                each.close()
            process.terminate()
            _, log = await asyncio.wait_for(process.communicate(), 60)
    assert [line for line in log.decode().splitlines() if "unhealthy" in line or "can't be reached" in line] == []
    assert len([line for line in log.decode().splitlines() if "file descriptors" in line]) == 1, "it is over"


async def test_a_gateway_without_instances_names_the_ways_to_add_one(tmp_path: Path) -> None:
    logs = []
    for number, settings in enumerate(({}, {"KVGATE_INSTANCES": '[{"id": "a", "url": "http://127.0.0.1:1"}]'})):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = await start(folder, **settings)
        url = await listening(process)
        async with aiohttp.ClientSession() as session, session.get(url + "/healthz") as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        logs.append((await asyncio.wait_for(process.communicate(), 60))[1].decode())
    assert (
        "no instances are configured: requests get 503 until one is added, with kvgate admin instances add" in logs[0]
    )
    assert "no instances are configured" not in logs[1]
