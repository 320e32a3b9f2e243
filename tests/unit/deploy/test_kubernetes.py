"""The Kubernetes base and its components: what refers to something else refers to what is there."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvgate
from dashboards.alerting import WEBHOOK
from gateway.settings import setting_fields
from gateway.settings.fleet import KubernetesSettings

ROOT = Path(__file__).parents[3]
BASE = ROOT / "deploy" / "kubernetes"
COMPONENTS = sorted((BASE / "components").iterdir())
RESOURCES: list[dict[str, Any]] = [
    document
    for folder in (BASE, *COMPONENTS)
    for path in yaml.safe_load((folder / "kustomization.yaml").read_text()).get("resources", ())
    if path.endswith(".yaml")
    for document in yaml.safe_load_all((folder / path).read_text())
]
WORKLOADS = [each for each in RESOURCES if each["kind"] in {"Deployment", "StatefulSet"}]
FOLDERS = (BASE, ROOT / "deploy" / "grafana", ROOT / "dashboards")
MOST_BYTES = 200_000
"""Of an object: `kubectl apply` writes it into an annotation once more, and annotations may have 262,144 together."""


def named(kind: str) -> set[str]:
    return {each["metadata"]["name"] for each in RESOURCES if each["kind"] == kind}


def generated(folder: Path) -> list[dict[str, Any]]:
    """Return the ConfigMaps that kustomize makes of a folder's files."""
    made: list[dict[str, Any]] = yaml.safe_load((folder / "kustomization.yaml").read_text())["configMapGenerator"]
    return made


def config_maps(volume: dict[str, Any]) -> set[str]:
    """Return the names of those that a volume is of."""
    sources = (volume, *volume.get("projected", {}).get("sources", ()))
    return {each["configMap"]["name"] for each in sources if "configMap" in each}


def containers(workload: dict[str, Any]) -> Iterator[dict[str, Any]]:
    pod = workload["spec"]["template"]["spec"]
    yield from (*pod.get("initContainers", ()), *pod["containers"])


def test_files_that_config_maps_are_made_of_exist() -> None:
    maps: set[str] = set()
    for folder in FOLDERS:
        for each in generated(folder):
            maps.add(each["name"])
            files = [folder / file for file in each.get("files", ())]
            assert [file for file in files if not file.is_file()] == []
            data = {file.name: file.read_text() for file in files}
            assert len(json.dumps(data)) < MOST_BYTES, f"{each['name']} could not be applied"
    used = {
        name
        for workload in WORKLOADS
        for volume in workload["spec"]["template"]["spec"].get("volumes", ())
        for name in config_maps(volume)
    }
    assert used | {"kvgate-settings"} == maps


def test_every_dashboard_is_mounted_where_grafana_looks_for_them() -> None:
    (grafana,) = (each for each in WORKLOADS if each["metadata"]["name"] == "grafana")
    (container,) = containers(grafana)
    (provider,) = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/kvgate.yml").read_text())["providers"]
    (volume,) = (each["name"] for each in container["volumeMounts"] if each["mountPath"] == provider["options"]["path"])
    volumes = {each["name"]: each for each in grafana["spec"]["template"]["spec"]["volumes"]}
    mounted = config_maps(volumes[volume])
    files = [file for each in generated(ROOT / "dashboards") if each["name"] in mounted for file in each["files"]]
    assert sorted(files) == sorted(f"grafana/{each.name}" for each in (ROOT / "dashboards" / "grafana").glob("*.json"))


def test_grafana_is_given_data_source_dashboards_and_alerts_and_the_variable_that_they_read() -> None:
    (grafana,) = (each for each in WORKLOADS if each["metadata"]["name"] == "grafana")
    (container,) = containers(grafana)
    mounted = {each["mountPath"].rpartition("/provisioning/")[2]: each["name"] for each in container["volumeMounts"]}
    volumes = grafana["spec"]["template"]["spec"]["volumes"]
    maps = {each["name"]: each.get("configMap", {}).get("name") for each in volumes}
    files = {each["name"]: sorted(each["files"]) for each in generated(ROOT / "deploy" / "grafana")}
    for folder in ("datasources", "dashboards", "alerting"):
        there = (ROOT / "deploy/grafana/provisioning" / folder).iterdir()
        assert files[maps[mounted[folder]]] == sorted(f"provisioning/{folder}/{each.name}" for each in there)
    (webhook,) = (each for each in container["env"] if each["name"] == WEBHOOK.removeprefix("$"))
    named = webhook["valueFrom"]["configMapKeyRef"]
    (settings,) = (each for each in generated(BASE) if each["name"] == named["name"])
    assert any(each.startswith(f"{named['key']}=http") for each in settings["literals"])


def test_every_image_is_pinned_and_our_own_carry_the_version_of_the_project() -> None:
    version = kvgate.__version__
    tags: dict[str, str] = {}
    for folder in (*COMPONENTS, BASE):
        for each in yaml.safe_load((folder / "kustomization.yaml").read_text()).get("images", ()):
            assert re.fullmatch(rf"{re.escape(version)}(-gpu|-cpu)?", str(each["newTag"])), folder
            tags[each["name"]] = str(each["newTag"])
    assert tags == {"kvgate-engine": f"{version}-cpu", "kvgate-gateway": version, "kvgate-locust": version}
    compose = (ROOT / "docker-compose.yml").read_text()
    for image in {each["image"] for workload in WORKLOADS for each in containers(workload)} - tags.keys():
        assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+(-alpine)?", image)
        assert f"image: {image}\n" in compose, "the same as in docker-compose.yml"


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each["metadata"]["name"])
def test_pods_run_without_privileges_and_say_how_they_are(workload: dict[str, Any]) -> None:
    template = workload["spec"]["template"]
    assert workload["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    pod = template["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    mounts = {each["name"] for each in pod.get("volumes", ())} | {
        each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", ())
    }
    for container in containers(workload):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"requests", "limits"} <= container["resources"].keys()
        assert {each["name"] for each in container["volumeMounts"]} <= mounts
    for container in pod["containers"]:
        assert {"readinessProbe", "livenessProbe"} <= container.keys()


def test_services_find_their_pods_by_label_and_port() -> None:
    for service in (each for each in RESOURCES if each["kind"] == "Service"):
        pods = [
            each["spec"]["template"]
            for each in WORKLOADS
            if service["spec"]["selector"].items() <= each["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert len(pods) == 1
        ports = {port["containerPort"] for each in pods[0]["spec"]["containers"] for port in each["ports"]}
        assert {port["port"] for port in service["spec"]["ports"]} <= ports


def test_only_gateways_prometheus_and_engines_reach_an_engine_and_each_only_what_it_needs() -> None:
    labels = {each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"] for each in WORKLOADS}
    (policy,) = (
        each["spec"] for each in RESOURCES if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == "engines"
    )
    assert [name for name in labels if policy["podSelector"]["matchLabels"].items() <= labels[name].items()] == [
        "engine"
    ]
    assert policy["policyTypes"] == ["Ingress"]
    let_in: dict[str, set[int]] = {}
    for rule in policy["ingress"]:
        assert {each["protocol"] for each in rule["ports"]} == {"TCP"}
        for source in rule["from"]:
            assert source.keys() == {"podSelector"}, "of this namespace"
            chosen = source["podSelector"]["matchLabels"].items()
            (name,) = (each for each in labels if chosen <= labels[each].items())
            let_in.setdefault(name, set()).update(each["port"] for each in rule["ports"])
    ports = {
        port["name"]: port["port"]
        for each in RESOURCES
        if each["kind"] == "Service" and each["metadata"]["name"] == "engines"
        for port in each["spec"]["ports"]
    }
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    handed_over = int(compose["x-pd-environment"]["KVGATE_ENGINE_PD_PORT"])
    assert let_in == {"gateway": set(ports.values()), "prometheus": {ports["http"]}, "engine": {handed_over}}


def test_the_gateway_finds_engines_and_is_told_only_settings_that_exist() -> None:
    pod = next(each for each in WORKLOADS if each["metadata"]["name"] == "gateway")["spec"]["template"]["spec"]
    told = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    settings = {name for name in told if name.startswith("KVGATE_") and not name.startswith("KVGATE_MODEL_")}
    assert {name.removeprefix("KVGATE_").lower() for name in settings} <= setting_fields().keys()
    found = KubernetesSettings(
        **json.loads((told["KVGATE_DISCOVERY_KUBERNETES"] or "").replace("$(NAMESPACE)", "kvgate"))
    )
    assert found.service in named("Service")
    assert pod["serviceAccountName"] in named("ServiceAccount")


def rendered(folder: Path) -> list[dict[str, Any]]:
    """Return what kustomize makes of a folder."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def test_kustomize_renders_the_base() -> None:
    objects = rendered(BASE)
    kinds = [each["kind"] for each in objects]
    assert kinds.count("ConfigMap") == 12
    assert kinds.count("Deployment") == 3
    assert kinds.count("NetworkPolicy") == 1
    assert {
        each["metadata"]["name"]: len(json.dumps(each)) for each in objects if len(json.dumps(each)) > MOST_BYTES
    } == {}
    mounted = {
        name
        for each in objects
        if each["kind"] == "Deployment"
        for volume in each["spec"]["template"]["spec"]["volumes"]
        for name in config_maps(volume)
    }
    assert mounted < {each["metadata"]["name"] for each in objects if each["kind"] == "ConfigMap"}, (
        "by their final names"
    )


def overlay(folder: Path, *components: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what an overlay with these components deploys, by kind and name."""
    here = Path(os.path.relpath(BASE, folder.resolve()))
    (folder / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "resources": [str(here)],
                "components": [str(here / "components" / each) for each in components],
            }
        )
    )
    return {(each["kind"], each["metadata"]["name"]): each for each in rendered(folder)}


def container_of(workload: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = workload["spec"]["template"]["spec"]["containers"][0]
    return found


def environment_of(workload: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in container_of(workload)["env"]}


def test_the_components_are_the_profiles_of_compose(tmp_path: Path) -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    profiles = {profile for each in compose["services"].values() for profile in each.get("profiles", ())}
    assert {each.name for each in COMPONENTS} == profiles - {"cpu"}, "the base's engines are on processors"
    objects = overlay(tmp_path, "redis", "gpu", "locust")
    assert environment_of(objects["Deployment", "gateway"])["KVGATE_REDIS_URL"] == "redis://redis:6379/0"
    redis = container_of(objects["Deployment", "redis"])
    assert redis["args"] == list(map(str, compose["services"]["redis"]["command"]))
    engine = container_of(objects["StatefulSet", "engine"])
    assert engine["image"].endswith("-gpu")
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert ("Service", "locust") in objects
    told = environment_of(objects["Deployment", "locust"])
    assert told.keys() | {"PYTHONDONTWRITEBYTECODE"} == compose["services"]["locust"]["environment"].keys()


def test_of_engines_with_roles_the_first_computes_prompts_and_all_may_be_asked_for_them(tmp_path: Path) -> None:
    engine = overlay(tmp_path, "pd")["StatefulSet", "engine"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    told = environment_of(engine)
    for name, value in compose["x-pd-environment"].items():
        if name.startswith("KVGATE_ENGINE_PD_") and not str(value).startswith("$"):
            assert told[name] == value
    container = container_of(engine)
    assert container["command"] == ["sh", "-c"]
    (line,) = container["args"]
    for name, role in (("engine-0", "prefill"), ("engine-1", "decode"), ("engine-10", "decode")):
        said = subprocess.run(
            ["/bin/sh", "-c", line.replace("exec kvgate", "echo")],
            env={**os.environ, "HOSTNAME": name, "KVGATE_MODEL_NAME": "m"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        assert said[0] == "engine"
        assert f"--role={role}" in said
        assert "--events-host=*" in said
        assert "--model=/models/m" in said
