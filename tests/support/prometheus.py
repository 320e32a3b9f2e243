"""A real Prometheus on loopback, that scrapes what a test names, with the project's rules."""

import math
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
import yaml

from dashboards.rules import RULES_FILE
from kvgate.host.ports import free_ports
from tests.support.processes import answers, eventually

STOP_LIMIT_S = 20.0


class Target(NamedTuple):
    """One endpoint to scrape; ``labels`` are added to its series."""

    job: str
    address: str
    labels: Mapping[str, str]


class Prometheus:
    """Answers PromQL."""

    def __init__(self, client: httpx2.Client) -> None:
        self._client = client

    def get(self, path: str, **params: str) -> Any:
        """Return the ``data`` of an answer, which must be a success."""
        told = self._client.get(f"/api/v1/{path}", params=params).json()
        assert told["status"] == "success", (path, params, told)
        return told["data"]

    def values(self, expr: str) -> list[float]:
        """Return what an expression finds now; what is no number is nothing."""
        found = [float(each["value"][1]) for each in self.get("query", query=expr)["result"]]
        return [value for value in found if not math.isnan(value)]

    def up(self) -> dict[str, str]:
        """Return each target's health."""
        return {each["scrapeUrl"]: each["health"] for each in self.get("targets")["activeTargets"]}

    def unhealthy_rules(self) -> dict[str, str]:
        """Return the rules that failed, or were not evaluated yet, and why."""
        groups = self.get("rules")["groups"]
        return {
            rule["name"]: rule.get("lastError", rule["health"])
            for group in groups
            for rule in group["rules"]
            if rule["health"] != "ok"
        }


def program(name: str) -> str:
    """Return where a program of Debian's package prometheus is; skips the test where it isn't installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian's package prometheus)")
    return found


@contextmanager
def running_prometheus(folder: Path, targets: list[Target]) -> Iterator[Prometheus]:
    """Run Prometheus while the block runs: a scrape a second, the jobs as ``dashboards/prometheus`` has them."""
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES_FILE)],
        "scrape_configs": [
            {
                "job_name": job,
                "honor_labels": job == "kvgate-gateway",
                "static_configs": [
                    {"targets": [each.address], "labels": dict(each.labels)} for each in targets if each.job == job
                ],
            }
            for job in sorted({each.job for each in targets})
        ],
    }
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    port = free_ports(1)[0]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: process.poll() is not None or answers(f"{url}/-/ready"), 60.0, "Prometheus")
        assert process.poll() is None, (folder / "prometheus.log").read_text()
        with httpx2.Client(base_url=url, timeout=30.0, trust_env=False) as client:
            yield Prometheus(client)
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def lint(text: str) -> list[str]:
    """Return what ``promtool check metrics`` says of an exposition."""
    checked = subprocess.run(
        [program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    return [line for line in (checked.stdout + checked.stderr).splitlines() if line.strip()]


__all__ = ["Prometheus", "Target", "lint", "program", "running_prometheus"]
