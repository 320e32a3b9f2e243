"""Policies of a running instance are shown and swapped under load, and nobody who asks notices."""

import json
import random
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcontrol.core.policy_control import POLICY_PATH
from tests.support.instance import Instance
from tests.support.kv_events import Answer, answer_to, get
from tests.support.processes import eventually
from tests.support.revisits import ask, context

pytestmark = pytest.mark.engine

POOL_BLOCKS = 64
TEXTS = [context(seed, 60) for seed in range(14)]
NEW_TOKENS = 4
CLIENTS = 4


@pytest.fixture(scope="module")
def instance(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    folder = tmp_path_factory.mktemp("policies")
    settings = {
        "KVGATE_ENGINE_DDR_BYTES": str(24 * 8192),
        "KVGATE_ENGINE_DDR_POLICY": "mq(lifetime=2)",
        "KVGATE_ENGINE_SHADOW_POLICIES": "lru,s3fifo",
    }
    options = ("--num-gpu-blocks", str(POOL_BLOCKS), "--logprobs-mode", "raw_logprobs")
    with Instance.start(tiny_llama, folder / "log", *options, settings=settings) as instance:
        yield instance


def put(instance: Instance, body: bytes | dict[str, Any]) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{instance.url}{POLICY_PATH}", data, method="PUT")  # noqa: S310 - our own
    return answer_to(request, 60.0)


def swap(instance: Instance, **change: Any) -> None:
    """Swap a policy; an engine on a machine under load may be too busy at first, and says so."""
    eventually(lambda: put(instance, change).status == 200, 60.0, "the engine never had time for a change")


def shown(instance: Instance) -> dict[str, dict[str, Any]]:
    answer = get(f"{instance.url}{POLICY_PATH}")
    assert answer.status == 200, answer
    return {each["kind"]: each for each in answer.body["policies"]}


def series(instance: Instance) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    def scrape() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        with urllib.request.urlopen(f"{instance.url}/metrics", timeout=30) as response:  # noqa: S310 - our own
            text = response.read().decode()
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def complete() -> bool:
        found.clear()
        found.update(scrape())
        return ("kvgate_engine_prefix_query_tokens_total", ()) in found

    eventually(complete, 60.0, "a scrape never found the engine at leisure")
    return found


def refusal(instance: Instance, body: bytes | dict[str, Any]) -> str:
    answer = put(instance, body)
    assert answer.status == 400, answer
    return str(answer.body["error"]["message"])


def test_adaptive_is_in_charge_from_the_start(instance: Instance) -> None:
    running = shown(instance)["eviction"]
    assert (running["name"], running["eviction"]["swaps"]) == ("adaptive", 0)
    assert running["eviction"]["adaptive"]["hits"] >= 0


def test_lru_and_s3fifo_take_over_from_adaptive_and_from_each_other_under_load(instance: Instance) -> None:
    expected = [ask(instance.url, text, new_tokens=NEW_TOKENS).tokens for text in TEXTS]
    before = series(instance)
    swaps_before = before["kv_policy_swaps_total", (("kind", "eviction"), ("tier", "HBM"))]
    stop = threading.Event()
    wrong: list[str] = []
    answered = [0] * CLIENTS

    def client(number: int) -> None:
        rng = random.Random(number)  # noqa: S311 - reproducible, not secret
        while not stop.is_set():
            place = rng.randrange(len(TEXTS))
            if ask(instance.url, TEXTS[place], new_tokens=NEW_TOKENS).tokens != expected[place]:
                wrong.append(TEXTS[place][:20])
            answered[number] += 1

    def more(requests: int) -> None:
        wanted = sum(answered) + requests
        eventually(lambda: sum(answered) >= wanted or bool(wrong), 240.0, "the clients are not served")

    counted = [before]
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            more(12)
            for name in ("lru", "s3fifo"):
                swap(instance, kind="eviction", name=name, params={})
                assert shown(instance)["eviction"]["name"] == name
                more(24)
                counted.append(series(instance))
        finally:
            stop.set()
        for each in clients:
            each.result(120)
    assert not wrong
    counted.append(series(instance))
    for name in ("kvgate_engine_prefix_query_tokens_total", "kvgate_engine_prefix_hit_tokens_total"):
        values = [found[name, ()] for found in counted]
        assert values == sorted(values), f"{name} has a seam"
        assert values[-1] > values[0]
    assert counted[-1]["kv_policy_swaps_total", (("kind", "eviction"), ("tier", "HBM"))] == swaps_before + 2
    assert counted[-1]["kvgate_engine_eviction_errors_total", ()] == 0
    assert counted[-1]["kvgate_engine_hook_errors_total", ()] == 0
    assert counted[-1]["kvgate_engine_policy_in_charge", (("policy", "s3fifo"), ("tier", "HBM"))] == 1
    running = shown(instance)["eviction"]["eviction"]
    assert running["evicted_blocks"] > 0
    assert 0 < running["resident_blocks"] <= running["capacity_blocks"] <= POOL_BLOCKS
    assert running["query"] >= running["query_since_swap"] > 0


def test_a_policy_that_is_in_charge_stays_when_it_is_asked_for_again(instance: Instance) -> None:
    swap(instance, kind="eviction", name="mq", params={"lifetime": 2})
    before = shown(instance)["eviction"]["eviction"]["swaps"]
    swap(instance, kind="eviction", name="mq", params={"lifetime": 2, "ghosts": 4})  # 4 is the default
    assert shown(instance)["eviction"]["eviction"]["swaps"] == before
    running = shown(instance)["eviction"]
    assert (running["params"], running["effective_params"]) == ({"lifetime": 2}, {"lifetime": 2, "ghosts": 4})
    swap(instance, kind="eviction", name="mq", params={"lifetime": 3})
    assert shown(instance)["eviction"]["eviction"]["swaps"] == before + 1


def test_what_was_resident_is_still_found_after_a_swap(instance: Instance) -> None:
    ask(instance.url, TEXTS[0], new_tokens=NEW_TOKENS)
    for name in ("lfu", "arc", "lru2", "mq", "fifo", "adaptive", "lru"):
        swap(instance, kind="eviction", name=name)
        again = ask(instance.url, TEXTS[0], new_tokens=NEW_TOKENS)
        assert again.cached >= again.prompt - 32, f"after the swap to {name} {again.cached} of {again.prompt} are left"


def test_the_tiers_below_have_policies_of_their_own(instance: Instance) -> None:
    assert (shown(instance)["eviction:ddr"]["name"], shown(instance)["eviction:ddr"]["params"]) == (
        "mq",
        {"lifetime": 2},
    )
    hbm = shown(instance)["eviction"]["eviction"]["swaps"]
    swap(instance, kind="eviction:ddr", name="s3fifo", params={"threshold": 1})
    swap(instance, kind="eviction", name="arc", tier="ddr")
    there = shown(instance)
    assert there["eviction:ddr"]["name"] == "arc"
    assert there["eviction:ddr"]["eviction"]["swaps"] == 2
    assert there["eviction"]["eviction"]["swaps"] == hbm
    for text in TEXTS:
        ask(instance.url, text, new_tokens=NEW_TOKENS)
    assert shown(instance)["eviction:ddr"]["eviction"]["resident_blocks"] > 0


def test_shadows_say_what_each_would_have_found_and_can_be_chosen(instance: Instance) -> None:
    assert shown(instance)["shadow"]["name"] == "lru,s3fifo"
    swap(instance, kind="shadow", name="lru,mq(lifetime=2),adaptive")
    for _ in range(2):
        for text in TEXTS[:3]:
            ask(instance.url, text, new_tokens=NEW_TOKENS)

    def shadow() -> dict[str, Any]:
        found: dict[str, Any] = shown(instance)["shadow"]["shadow"]
        return found

    assert [each["policy"] for each in shadow()["standings"]] == ["lru", "mq(lifetime=2)", "adaptive"]
    eventually(  # they may be told a moment later
        lambda: (found := shadow())["requests"] + found["skipped_requests"] >= 6, 60.0, f"{shadow()}"
    )
    eventually(  # they are followed when nobody waits
        lambda: all(0 < each["hits"] <= each["lookups"] for each in shadow()["standings"]), 60.0, f"{shadow()}"
    )
    found = series(instance)
    assert found["kvgate_engine_shadow_lookups_total", (("policy", "adaptive"),)] > 0
    assert found["kvgate_engine_shadow_busy_seconds_total", ()] > 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": "eviction", "name": "best"}, "unknown policy 'best'; known: lru"),
        ({"kind": "eviction", "name": "mq", "params": {"lifetime": 0}}, "lifetime is 0; allowed is a number from 0.01"),
        ({"kind": "eviction", "name": "lru", "params": {"size": 1}}, "has no parameter 'size'"),
        ({"kind": "eviction", "name": "lru2", "params": {"history_blocks": 10**400}}, "history_blocks has 401 digits"),
        (
            {"kind": "eviction", "name": "mq", "params": {"lifetime": "long"}},
            "lifetime is 'long'; policies take numbers",
        ),
        ({"kind": "eviction", "name": "lru", "tier": "nvme"}, "unknown tier 'nvme'; tiers of this instance: HBM, DDR"),
        ({"kind": "eviction:ddr", "name": "lru", "tier": "ddr"}, "names a tier already"),
        ({"kind": "routing", "name": "lru"}, "no policies of kind 'routing'; this instance has eviction, eviction:ddr"),
        ({"kind": "eviction", "name": "lru", "speed": 1}, "speed"),
        ({"kind": "shadow", "name": "lru,lru"}, "named twice"),
        ({"kind": "shadow", "name": "lru", "params": {"a": 1}}, "no params"),
        ({"name": "lru"}, "kind"),
        (b"no json", "invalid body"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason_and_changes_nothing(
    instance: Instance, change: bytes | dict[str, Any], why: str
) -> None:
    before = shown(instance)
    assert why in refusal(instance, change)
    after = shown(instance)
    assert {kind: (each["name"], each["params"]) for kind, each in after.items()} == {
        kind: (each["name"], each["params"]) for kind, each in before.items()
    }
