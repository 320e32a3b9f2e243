"""What the commands say about themselves, and that a refusal is a message, never a traceback."""

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from engines.models.tiny import build_tiny
from kvgate import doctor
from kvgate.doctor import Verdict, examine
from kvgate.engine.model import Model
from kvgate.host.ports import free_ports
from kvgate.up.announce import QUESTION, curl
from kvgate.up.api_keys import ApiKey
from kvgate.up.stack import GatewayOptions, Routing
from tests.support.command import typed

MODEL = Model(folder=Path("/m"), name="it's a model")


def in_a_process(*words: str, **environment: str) -> str:
    """Return what a command prints that begins as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "kvgate", *words],
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    ).stdout


def options(*keys: ApiKey) -> GatewayOptions:
    return GatewayOptions(
        host="127.0.0.1", port=8000, api_keys=keys, routing=Routing.COST_AWARE, state_dir=Path("/nowhere")
    )


@pytest.mark.parametrize("command", ["up", "engine", "doctor", "replay", "simulate"])
def test_each_command_explains_itself(command: str) -> None:
    answer = typed(command, "--help")
    assert answer.code == 0
    assert f"Usage: kvgate {command}" in answer.out


def test_help_of_up_names_every_option() -> None:
    answer = in_a_process("up", "--help", LC_ALL="C", PYTHONIOENCODING="", PYTHONUTF8="")
    assert answer.isascii(), "a terminal of the locale C shows nothing else"
    for option in (
        *("--model", "--tiny", "--instances", "--host", "--port", "--device", "--block-size", "--kv-blocks"),
        *("--kv-memory", "--max-batch-size", "--threads", "--itl-target", "--routing", "--api-key", "--state-dir"),
    ):
        assert option in answer


@pytest.mark.parametrize("form", ["--json", "--markdown", ""])
def test_a_report_that_can_not_be_printed_is_said_in_one_line(tmp_path: Path, form: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": [1, 2], "input_length": 1024, "output_length": 4, "timestamp": 0}\n')
    with Path("/dev/full").open("w") as full:
        answer = typed("simulate", str(trace), *filter(None, [form]), into=full)
    assert (answer.code, answer.err) == (1, "kvgate: cannot write to standard output: No space left on device\n")


def test_the_version_is_that_of_the_package() -> None:
    assert in_a_process("--version") == f"kvgate {importlib.metadata.version('kvgate')}\n"


@pytest.mark.parametrize("command", [[], ["up"], ["admin", "tenants"], ["bench", "prefix"]])
def test_a_short_h_is_help(command: list[str]) -> None:
    assert typed(*command, "-h").out == typed(*command, "--help").out


@pytest.mark.parametrize(
    ("line", "found"),
    [("kvgate sim", ["sim", "simulate"]), ("kvgate admin ten", ["tenants"]), ("kvgate simulate --rou", ["--routing"])],
)
def test_a_shell_completes_commands_and_their_options(line: str, found: list[str]) -> None:
    word = str(len(line.split()) - 1)
    said = in_a_process(_KVGATE_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=word)
    assert said.split() == found


def test_the_gateways_help_is_its_own() -> None:
    assert "--config" in in_a_process("gateway", "--help")  # it becomes another program


def test_an_unknown_option_is_named() -> None:
    answer = typed("up", "--tinny")
    assert answer.code == 2
    assert "--tinny" in answer.err


def test_an_engine_on_a_cpu_takes_no_share_of_a_gpus_memory(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tiny")
    answer = typed("engine", "--model", str(folder), "--device", "cpu", "--kv-memory", "40%")
    assert answer.code == 1
    assert "--kv-memory on a CPU is an amount, for example 2GiB" in answer.err


def test_an_engine_needs_a_model_folder(tmp_path: Path) -> None:
    answer = typed("engine", "--model", str(tmp_path / "absent"))
    assert answer.code == 1
    assert "no such folder" in answer.err
    assert "Traceback" not in answer.err


def test_the_curl_is_one_shell_command_whatever_the_models_name() -> None:
    words = shlex.split(curl(options(), MODEL))
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's a model"
    assert body["messages"] == [{"role": "user", "content": QUESTION}]
    assert not any("authorization" in word for word in words)


def test_the_curl_presents_the_first_key() -> None:
    words = shlex.split(curl(options(ApiKey(key="sk-1", tenant="acme"), ApiKey(key="sk-2", tenant="b")), MODEL))
    assert "authorization: Bearer sk-1" in words


def test_the_curl_shows_no_key_that_was_not_typed() -> None:
    command = curl(options(ApiKey(key="sk-hush", tenant="acme", shown=False)), MODEL)
    assert "hush" not in command
    assert "authorization: Bearer $KVGATE_API_KEY" in shlex.split(command)


def test_the_curl_presents_a_key_where_an_earlier_run_stored_some() -> None:
    assert "authorization: Bearer $KVGATE_API_KEY" in shlex.split(curl(options(), MODEL, stored_keys=True))
    assert "authorization" not in curl(options(), MODEL)


def test_doctor_as_json_is_one_object(tmp_path: Path) -> None:
    answer = typed("doctor", "--json", "--port", str(free_ports(1)[0]), KVGATE_CACHE_DIR=str(tmp_path))
    report = json.loads(answer.out)
    assert answer.code == 0, report
    assert report["ok"] is True
    checks = {finding["check"]: finding for finding in report["checks"]}
    assert set(checks) == {
        *("python", "torch", "device", "lmdeploy", "port", "sockets", "state", "cache", "memory", "model"),
    }
    assert checks["lmdeploy"]["found"].endswith("all hooks match")
    assert "not downloaded yet" in checks["model"]["found"]
    assert "long-context-128k" in report["presets"]
    assert "nvidia-h100" in report["hardware"]


def test_doctor_names_what_would_keep_kvgate_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "torch_version", lambda: None)
    monkeypatch.setattr(doctor, "_CHECK_HOOKS", "raise SystemExit('LMDeploy moved a symbol')")
    findings = {finding.check: finding for finding in examine(free_ports(1)[0])}
    assert findings["torch"].verdict is Verdict.FAIL
    assert findings["torch"].advice == "pip install 'kvgate[engine]' (make setup in a checkout)"
    assert findings["lmdeploy"].verdict is Verdict.FAIL
    assert "LMDeploy moved a symbol" in findings["lmdeploy"].found


def test_doctor_shows_what_it_checks_beside_its_report(tmp_path: Path) -> None:
    answer = typed("doctor", "--json", "--port", str(free_ports(1)[0]), KVGATE_CACHE_DIR=str(tmp_path))
    checks = [finding["check"] for finding in json.loads(answer.out)["checks"]]
    assert answer.err.splitlines() == [f"  checking {name}" for name in checks]


@pytest.mark.parametrize("package", ["lmdeploy", "torch"])
@pytest.mark.parametrize("command", [["up", "--tiny"], ["engine", "--model", "/nonexistent"]])
def test_an_engine_without_its_packages_is_refused_with_the_extra_to_install(
    command: list[str], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # the import system's "not installed"
    answer = typed(*command)
    assert answer.code == 1
    assert answer.err.splitlines() == [
        f"kvgate: an engine needs {package}, and this installation has no such package",
        "-> install the engine: pip install 'kvgate[engine]' (make setup in a checkout)",
    ]


def test_doctor_sees_a_port_in_use_as_a_warning() -> None:
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        finding = doctor.check_port(holder.getsockname()[1])
    assert finding.verdict is Verdict.WARN
    assert "in use" in finding.found


def test_doctor_sees_a_damaged_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engines.models import smollm2

    monkeypatch.setenv("KVGATE_CACHE_DIR", str(tmp_path))
    (tmp_path / smollm2.NAME).mkdir()
    finding = doctor.check_model()
    assert finding.verdict is Verdict.WARN
    assert "not complete" in finding.found


def test_doctor_says_what_of_a_preset_fits(tmp_path: Path) -> None:
    answer = typed(
        *("doctor", "--preset", "low-latency", "--hardware", "ascend-910b", "--json"),
        KVGATE_CACHE_DIR=str(tmp_path),
    )
    report = json.loads(answer.out)
    assert answer.code == 1
    assert report["ok"] is False
    assert (report["preset"], report["hardware"]) == ("low-latency", "ascend-910b")
    assert report["values"]["ddr.size"] == "32GiB"
    assert set(report["not_measured"]) <= set(report["values"])
    checks = {finding["check"]: finding["verdict"] for finding in report["checks"]}
    assert checks["hardware"] == "fail"
    assert list(tmp_path.iterdir()) == []


def test_doctor_prints_beside_each_value_whether_it_was_measured(tmp_path: Path) -> None:
    answer = typed("doctor", "--preset", "low-latency", "--hardware", "nvidia-h100", KVGATE_CACHE_DIR=str(tmp_path))
    lines = {line.split()[0]: line for line in answer.out.splitlines() if line.strip()}
    assert lines["quota.burst_share"].rstrip().endswith("not measured, of each tier, for one tenant")
    assert lines["ddr.size"].rstrip().endswith("not measured")
    assert lines["max_batch_size"].split() == ["max_batch_size", "16"]


def test_doctor_answers_an_unknown_preset_with_the_known_ones() -> None:
    answer = typed("doctor", "--preset", "fast")
    assert answer.code == 1
    assert "unknown preset 'fast'; known: long-context-32k" in answer.err
    assert "Traceback" not in answer.err


def test_doctor_refuses_what_only_goes_with_a_preset() -> None:
    answer = typed("doctor", "--hardware", "cpu")
    assert answer.code == 1
    assert "need --preset" in answer.err


@pytest.mark.parametrize("command", ["up", "engine"])
def test_engines_can_be_given_presets_and_tiers(command: str) -> None:
    answer = typed(command, "--help").out
    for option in ("--preset", "--hardware", "--ddr", "--ddr-path", "--nvme", "--nvme-dir", "--tier-write"):
        assert option in answer
    assert "write_on_second_use" in answer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--preset", "fast"), "unknown preset 'fast'; known: long-context-32k"),
        (("--preset", "throughput", "--hardware", "ascend-910b"), "the preset is for ascend-910b"),
        (("--nvme", "1GiB"), "--nvme: no DDR tier is configured"),
        (("--ddr", "1GiB", "--tier-write", "write_through"), "--tier-write: no NVMe tier is configured"),
        (("--ddr", "lots"), "--ddr is 'lots'; expected an amount of memory, for example 512MiB or 2GiB"),
        (("--role", "decode", "--ddr", "1GiB"), "--role decode cannot be combined with tiers (--ddr, --preset)"),
        (("--ddr", "900TiB"), "the tiers do not fit this machine: memory: 921600 GiB for DDR"),
    ],
)
def test_tiers_that_can_not_be_are_refused_before_anything_starts(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    folder = build_tiny(tmp_path / "tiny")
    answer = typed("engine", "--model", str(folder), "--device", "cpu", *options)
    assert answer.code == 1
    assert message in answer.err
    assert "Traceback" not in answer.err
