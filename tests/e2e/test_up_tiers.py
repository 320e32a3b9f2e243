"""``kvgate up`` with a preset and tiers: each engine has its own, and a Prometheus sees what all of it does."""

import json
import re
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dashboards.panel import Proof
from dashboards.promql import selected, series_of_samples
from dashboards.rules import RULES_FILE, load_rules
from kvcontrol.series import ENGINE, GATEWAY, LMDEPLOY
from kvgate.host.ports import free_ports
from tests.support.browser import browsing
from tests.support.collector import Collector, running_collector
from tests.support.panels import finds, queries_of, until_all_find
from tests.support.processes import eventually, running
from tests.support.prometheus import Prometheus, Target, lint, program, running_prometheus

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MIB = 1 << 20
TENANTS = ("acme", "omega", "umbra")
KEYS = tuple(word for tenant in TENANTS for word in ("--api-key", f"{tenant}:k-{tenant}"))
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
DDR, NVME = 4 * MIB, 16 * MIB
AGO = (2, 6, 10, 14, 40)
"""So many new prompts ago was what is asked again: the pool has it still, or DDR, or it went on to NVMe."""
MOVES = {
    'sum by (instance, path) (kvgate_engine_path_moved_bytes_total{path=~"hbm_to_ddr|ddr_to_hbm|ddr_to_nvme"}) > 0': 3,
    "sum by (instance) (kvgate_engine_migration_judged_blocks_total) > 0": 1,
}
"""What every engine does while that goes on, and of how many kinds."""
LIMITED = {"requests_per_min": 20, "tokens_per_min": 100_000}
"""A tenant that an engine was told of, and no gateway can name."""


class Stack(NamedTuple):
    gateway: str
    engines: dict[str, str]
    said: str
    folder: Path
    collector: Collector


@pytest.fixture(scope="module")
def stack(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two engines with small pools and tiers, and tenants of whom two together fill DDR: one's burst is less."""
    folder = tmp_path_factory.mktemp("tiers")
    port = str(free_ports(1)[0])
    asked = (
        "--preset",
        "long-context-64k",
        "--hardware",
        "cpu",
        "--kv-blocks",
        "64",
        "--ddr",
        f"{DDR // MIB}MiB",
        "--nvme",
        f"{NVME // MIB}MiB",
    )
    places = ("--ddr-path", str(folder / "ddr"), "--nvme-dir", str(folder / "nvme"))
    command = ["up", "--tiny", "--device", "cpu", "--port", port, *asked, *places, *KEYS]
    with running_collector() as collector:
        more = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        more["KVGATE_ENGINE_PREFETCH_PROBABILITY"] = "0.5"
        with running(command, folder / "up.log", environment | more, warm=3) as up:
            up.until_said("Ctrl-C stops everything")
            engines = dict(re.findall(rf"(engine-\d) +(http://\S+)   tiers: DDR {DDR // MIB} MiB", up.said))
            yield Stack(f"http://127.0.0.1:{port}", engines, up.said, folder, collector)


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - an engine of this test
        return str(answer.read().decode())


def read(url: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(fetch(url))
    return told


def saved_tenants(url: str) -> set[str]:
    return {block["tenant"] for block in read(f"{url}/kv/v1/blocks")["blocks"]}


def ask(gateway: str, key: str, prompt: str = "a " * 200, traceparent: str = "", **more: object) -> None:
    body = {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 4,
        "ignore_eos": True,
        **more,
    }
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    if traceparent:
        headers["traceparent"] = traceparent
    request = urllib.request.Request(f"{gateway}/v1/chat/completions", json.dumps(body).encode(), headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 - a gateway of this test
        assert answer.status == 200
        answer.read()


def put(url: str, body: object, **headers: str) -> None:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"} | headers, method="PUT")  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - a process of this test
        assert answer.status < 300, answer.read()


def new_and_known() -> Iterator[int]:
    """Yield numbers of prompts: each new one, and after it one of before."""
    for new in count():
        yield new
        yield max(0, new - AGO[new % len(AGO)])


@contextmanager
def load(gateway: str) -> Iterator[list[BaseException]]:
    """Tenants that ask something new and something again by turns, as long as the block runs, so that blocks are
    saved, evicted, moved and loaded all the time. After a 429 they ask the same again. Yields what has ended one.
    """
    over = threading.Event()
    failures: list[BaseException] = []

    def work(*tenants: str) -> None:
        asked = ((tenant, prompt) for prompt in new_and_known() for tenant in tenants)
        tenant, prompt = next(asked)
        while not over.is_set():
            try:
                ask(gateway, f"k-{tenant}", f"{prompt}" + " a" * 600, stream=True)
                tenant, prompt = next(asked)
            except OSError as error:
                if not isinstance(error, urllib.error.HTTPError) or error.code != 429:
                    failures.append(error)
                    return
                error.close()
                over.wait(0.2)
            over.wait(0.05)

    threads = [threading.Thread(target=work, args=tenants) for tenants in (("acme", "omega"), ("umbra",))]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert failures == []


def test_each_engine_has_the_tiers_that_preset_and_options_ask_for(stack: Stack) -> None:
    assert "Preset long-context-64k on cpu" in stack.said
    assert "not applied" not in stack.said
    assert set(stack.engines) == {"engine-0", "engine-1"}
    for url in stack.engines.values():
        tiers = read(f"{url}/kv/v1/stats")["tiers"]
        sizes = {name: tiers[name]["capacity_blocks"] * tiers[name]["block_bytes"] for name in ("DDR", "NVME")}
        block = tiers["DDR"]["block_bytes"]
        assert DDR - block < sizes["DDR"] <= DDR
        assert NVME - block < sizes["NVME"] <= NVME
    ask(stack.gateway, "k-acme")
    eventually(lambda: any(map(saved_tenants, stack.engines.values())), 60, "a saved block")
    tenants = set().union(*map(saved_tenants, stack.engines.values()))
    assert len(tenants) == 1
    for url in stack.engines.values():
        for tier, share in (("DDR", DDR), ("NVME", NVME)):
            accounts = read(f"{url}/kv/v1/quotas")["tiers"][tier]
            guaranteed = {name: each["quota"] for name, each in accounts.items() if name != "shared"}
            assert len(guaranteed) == len(TENANTS)
            assert tenants < set(guaranteed), "who has a key is who its requests are accounted to"
            for quota in guaranteed.values():
                assert quota["guaranteed_bytes"] == pytest.approx(0.1 * share, abs=block)
                assert quota["burst_bytes"] == pytest.approx(0.6 * share, abs=block)
    assert {path.name for path in stack.folder.iterdir()} >= {"ddr-0", "ddr-1", "nvme"}
    assert {path.name for path in (stack.folder / "nvme").iterdir()} == {"engine-0", "engine-1"}
    assert DDR <= (stack.folder / "ddr-0").stat().st_size < 2 * DDR


def test_a_request_is_one_trace_over_gateway_and_engine(stack: Stack) -> None:
    trace, caller = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    prompt = "nobody else reads this " * 8
    ask(stack.gateway, "k-acme", prompt, stream=True, traceparent=f"00-{trace}-{caller}-01")
    collector = stack.collector

    def whole() -> bool:
        """The span of each that ends last, as the others may have come before."""
        last = {each.service for each in collector.of(trace) if each.name.startswith("POST ")}
        return last == {"kvgate-gateway", "kvgate-engine"}

    eventually(whole, 60, "the spans of both")
    spans = {(each.service.removeprefix("kvgate-"), each.name): each for each in collector.of(trace)}
    path = "POST /v1/chat/completions"
    root, attempt, engine = spans["gateway", path], spans["gateway", "chat tiny-llama"], spans["engine", path]
    assert (root.parent, attempt.parent, engine.parent) == (caller, root.span_id, attempt.span_id)
    phases = [spans["engine", name] for name in ("prepare", "queue", "prefill", "decode")]
    assert {each.parent for each in phases} == {engine.span_id}
    for before, after in pairwise(phases):
        assert before.end_ns == after.start_ns
    assert engine.start_ns <= phases[0].start_ns
    assert phases[-1].end_ns <= engine.end_ns
    used = attempt.attributes
    assert engine.attributes["kvgate.prompt_tokens"] == used["gen_ai.usage.input_tokens"]
    assert phases[-1].attributes["kvgate.tokens"] == used["gen_ai.usage.output_tokens"]
    assert not any(b"nobody else reads" in each for each in collector.raw)


def test_an_engine_exposes_the_catalogue_and_nothing_beside_it_and_promtool_finds_no_fault(stack: Stack) -> None:
    ask(stack.gateway, "k-acme")
    declared = {each.name: each for each in ENGINE}
    lmdeploy: set[str] = set()
    for url in stack.engines.values():
        text = fetch(f"{url}/metrics")
        families = {each.name: each for each in text_string_to_metric_families(text)}
        ours = {name: each for name, each in families.items() if name.startswith("kv")}
        assert ours.keys() - declared.keys() == set()
        assert {each.name for each in ENGINE if not each.appears} - ours.keys() == set()
        for name, family in ours.items():
            series = declared[name]
            assert (family.type, family.documentation) == (series.kind, series.help)
            for sample in family.samples:
                assert set(sample.labels) - {"le"} == set(series.labels), sample
        lmdeploy |= {sample.name.removesuffix("_bucket") for each in families.values() for sample in each.samples}
        accepted = urllib.request.Request(f"{url}/metrics", headers={"accept": OPENMETRICS})  # noqa: S310
        with urllib.request.urlopen(accepted, timeout=60) as answer:  # noqa: S310 - an engine of this test
            assert b"lmdeploy:num_requests_running" in answer.read(), "its colons are its names' own"
        assert [line for line in lint(text) if not line.startswith("lmdeploy:")] == []
    assert {name for name in LMDEPLOY if name.startswith("lmdeploy:")} - lmdeploy == set()
    assert lint(fetch(f"{stack.gateway}/metrics")) == []


def test_adaptive_chooses_what_leaves_every_tier(stack: Stack) -> None:
    for url in stack.engines.values():
        names = {each["kind"]: each["name"] for each in read(f"{url}/kv/v1/policy")["policies"]}
        assert {kind: names[kind] for kind in ("eviction", "eviction:ddr", "eviction:nvme")} == {
            "eviction": "adaptive",
            "eviction:ddr": "adaptive",
            "eviction:nvme": "adaptive",
        }


async def test_the_status_page_swaps_the_policy_of_running_engines(stack: Stack, environment: dict[str, str]) -> None:
    def in_charge() -> set[str]:
        policies = [read(f"{url}/kv/v1/policy")["policies"] for url in stack.engines.values()]
        return {each["name"] for known in policies for each in known if each["kind"] == "eviction"}

    key = (Path(environment["KVGATE_STATE_DIR"]) / "admin.key").read_text().strip()
    (before,) = in_charge()
    ask(stack.gateway, "k-acme")
    async with browsing() as page:
        await page.look(width=1280, dark=False)
        await page.sign_in(stack.gateway, key, "policies")
        for name in ("s3fifo", before):
            await page.until("!document.querySelector('#swap-form button').disabled")
            await page.eval(
                "document.getElementById('swap-name').value = ''; document.getElementById('swap-name').focus()"
            )
            await page.type(name)
            await page.press("Enter")
            await page.until("document.activeElement.id === 'confirm-yes'")
            await page.press("Enter")
            await page.says(f"Done: {name} is in charge")
            assert in_charge() == {name}
            ask(stack.gateway, "k-acme", f"{name} " * 150)
        assert page.problems == []


def test_every_query_of_every_dashboard_and_every_rule_finds_data_in_a_real_prometheus(
    stack: Stack, environment: dict[str, str], tmp_path: Path
) -> None:
    """One tenant is past its quota, which an alert says, and `adaptive` is in charge: nearly all panels have something
    to show. What has not is proven elsewhere, and is to be empty here.
    """

    def address(url: str) -> str:
        return url.removeprefix("http://")

    key = {"authorization": "Bearer " + (Path(environment["KVGATE_STATE_DIR"]) / "admin.key").read_text().strip()}
    put(f"{stack.gateway}/admin/v1/quotas/umbra", LIMITED, **key)
    targets = [
        Target("kvgate-gateway", address(stack.gateway), {"gateway": "g"}),
        *(Target("kvgate-engine", address(url), {"instance": name}) for name, url in stack.engines.items()),
    ]
    with running_prometheus(tmp_path, targets) as prometheus, load(stack.gateway) as failures:

        def well() -> bool:
            assert failures == [], "nobody asks any more"
            return set(prometheus.up().values()) == {"up"} and not prometheus.unhealthy_rules()

        def everywhere() -> bool:
            return all(len(prometheus.values(move)) == kinds * len(stack.engines) for move, kinds in MOVES.items())

        until_all_find(prometheus, queries_of(Proof.FLEET), also=well)
        eventually(everywhere, 180, f"at both engines: {', '.join(MOVES)}")
        quiet = queries_of(Proof.SEPARATED, Proof.WORKERS, Proof.NONE)
        assert [where for where, query in quiet.items() if finds(prometheus, query)] == [], "why is it called quiet?"
        for query in queries_of(Proof.ACCIDENTS).values():  # the machine may have had one
            finds(prometheus, query)
        assert missing_of_rules(prometheus) == []


def missing_of_rules(prometheus: Prometheus) -> list[str]:
    """What recording rules have not recorded, and what alerts read that isn't there."""
    later = {sample for each in (*GATEWAY, *ENGINE) if each.appears for sample in each.samples}
    recorded = [each.name for each in load_rules() if not each.alert]
    read_by_alerts = {name for each in load_rules() if each.alert for name in selected(each.expr)}
    return [
        name
        for name in (*recorded, *sorted(read_by_alerts & series_of_samples().keys() - later))
        if not prometheus.values(f"count({name})")
    ]


def test_rules_fire_where_they_should_and_are_silent_where_all_is_well() -> None:
    tests = RULES_FILE.with_name("rules_test.yml")
    checked = subprocess.run(
        [program("promtool"), "test", "rules", tests.name],
        cwd=tests.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_configuration_of_prometheus_is_right() -> None:
    file = RULES_FILE.with_name("prometheus.yml")
    checked = subprocess.run(
        [program("promtool"), "check", "config", "--syntax-only", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
