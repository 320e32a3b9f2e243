"""An instance is two processes, and whichever is killed, neither is left."""

import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from engines.lmdeploy.lifeline import ENGINE_DIED_EXIT_CODE
from tests.support.instance import LAUNCHER, Instance, arguments, free_port
from tests.support.warm_process import Warm

pytestmark = pytest.mark.engine

GONE_WITHIN_S = 90


def test_the_instance_exits_with_a_message_when_its_engine_process_is_killed(tiny_llama: Path, tmp_path: Path) -> None:
    with Instance.start(tiny_llama, tmp_path / "log", fresh=True) as instance:
        engine = instance.engine_process()
        engine.kill()
        assert instance.process.wait(GONE_WITHIN_S) == ENGINE_DIED_EXIT_CODE
        assert f"the engine process {engine.pid} died (killed by SIGKILL), the instance exits" in instance.output()


def test_no_process_is_left_when_the_instance_is_killed(tiny_llama: Path, tmp_path: Path) -> None:
    with Instance.start(tiny_llama, tmp_path / "log") as instance:
        children = instance.children()
        assert instance.engine_process() in children
        instance.process.kill()
        instance.process.wait(GONE_WITHIN_S)
        _, alive = psutil.wait_procs(children, timeout=GONE_WITHIN_S)
        assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []


def test_a_terminated_instance_ends_in_order(tiny_llama: Path, tmp_path: Path) -> None:
    with Instance.start(tiny_llama, tmp_path / "log") as instance:
        children = instance.children()
        instance.process.send_signal(signal.SIGTERM)
        instance.process.wait(GONE_WITHIN_S)
        assert "died" not in instance.output()
        _, alive = psutil.wait_procs(children, timeout=GONE_WITHIN_S)
        assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []


def _refusal(log: Path, *words: str, **environment: str) -> str:
    with log.open("wb") as output:
        process = Warm.mine().start(LAUNCHER, words, environment={**os.environ, **environment}, output=output)
    assert process.wait(120) == 1
    lines = log.read_text().strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_a_taken_port_is_one_line_and_not_a_minute_of_loading(tiny_llama: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"can't listen on 127.0.0.1:{port}" in _refusal(tmp_path / "log", *arguments(tiny_llama, port))


def test_a_missing_model_folder_is_one_line(tmp_path: Path) -> None:
    line = _refusal(tmp_path / "log", *arguments("/no/such/model", free_port()))
    assert "unknown model folder /no/such/model" in line


def test_a_wrong_setting_is_one_line_that_names_it(tiny_llama: Path, tmp_path: Path) -> None:
    line = _refusal(tmp_path / "log", *arguments(tiny_llama, free_port()), KVGATE_ENGINE_CPU_THREADS="many")
    assert "KVGATE_ENGINE_CPU_THREADS='many'" in line
