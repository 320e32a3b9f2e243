"""``/kv/v1`` for operators and ``/metrics`` of an instance with tiers, over HTTP: good and bad input."""

import json
import random
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvcontrol.core.control import SNAPSHOT_PATH, STATS_PATH
from kvcontrol.core.prefix_control import INVALIDATE_PATH, PIN_PATH, PREFIXES_PATH, UNPIN_PATH
from kvcontrol.core.tenant import tenant_of_salt
from kvcontrol.core.tier_control import BLOCKS_PATH, MIGRATE_PATH, QUOTAS_PATH, RESET_PATH
from tests.support.instance import Instance
from tests.support.kv_events import Answer, answer_to, get
from tests.support.processes import eventually
from tests.support.tiered_instance import TieredInstance

pytestmark = pytest.mark.engine

BLOCK_BYTES = 8192
SOMEBODY = tenant_of_salt("a salt")
TEXTS = [f"{number} Say it again, slowly and in other words, so that all may follow. " * 6 for number in range(6)]


@pytest.fixture(scope="module")
def instance(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredInstance]:
    folder = tmp_path_factory.mktemp("tiered")
    settings = {
        "KVGATE_ENGINE_DDR_BYTES": str(64 * BLOCK_BYTES),
        "KVGATE_ENGINE_NVME_PATH": str(folder),
        "KVGATE_ENGINE_NVME_BYTES": str(512 * BLOCK_BYTES),
    }
    options = ("--num-gpu-blocks", "64", "--session-len", "700", "--logprobs-mode", "raw_logprobs")
    with TieredInstance.begin(tiny_llama, folder, settings, *options) as instance:
        for _ in range(2):
            for text in TEXTS:
                instance.ask(text, new_tokens=4, salt="tenant-a" if text is TEXTS[0] else "")
        yield instance


def send(url: str, method: str, body: bytes | dict[str, Any]) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return answer_to(urllib.request.Request(url, data, method=method), 60.0)  # noqa: S310 - our own


def refusal(answer: Answer, status: int = 400) -> str:
    assert answer.status == status, answer
    return str(answer.body["error"]["message"])


def test_blocks_are_listed_by_tier_and_tenant(instance: TieredInstance) -> None:
    answer = get(f"{instance.url}{BLOCKS_PATH}?limit=10000")
    assert answer.status == 200, answer
    assert answer.body["total"] == len(answer.body["blocks"]) > 64
    first = answer.body["blocks"][0]
    assert set(first) == {"hash", "tiers", "size_bytes", "tenant", "idle_s"}
    assert first["size_bytes"] == BLOCK_BYTES
    in_ddr = get(f"{instance.url}{BLOCKS_PATH}?tier=DDR&limit=10000").body
    assert 0 < in_ddr["total"] <= 64
    assert all("DDR" in block["tiers"] for block in in_ddr["blocks"])
    shared = get(f"{instance.url}{BLOCKS_PATH}?tenant=shared&limit=3").body
    assert len(shared["blocks"]) == 3
    assert shared["total"] < answer.body["total"]
    assert get(f"{instance.url}{BLOCKS_PATH}?tenant=nobody").body == {"total": 0, "blocks": []}


def test_prefixes_are_pinned_unpinned_and_forgotten_by_hash(instance: TieredInstance) -> None:
    hashes = get(instance.url + SNAPSHOT_PATH).body["tiers"]["HBM"][-1:]

    def done(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answers: list[Answer] = []

        def is_done() -> bool:
            answers.append(send(instance.url + path, "POST", body))
            return answers[-1].status != 503

        eventually(is_done, 60.0, "the engine never had time")
        assert answers[-1].status == 200, answers[-1]
        found: dict[str, Any] = answers[-1].body
        return found

    pin = done(PIN_PATH, {"hashes": hashes, "ttl_s": 600})
    assert pin["hash"] == hashes[0]
    assert pin["tokens"] == 16 * pin["blocks"]
    assert pin["missing"] == 0
    shown = get(instance.url + PREFIXES_PATH).body
    assert [each["hash"] for each in shown["pins"]] == hashes
    assert 0 < shown["pinned_blocks"] <= shown["limit_blocks"]
    assert done(UNPIN_PATH, {"hash": hashes[0]}) == {"unpinned": True}
    assert done(UNPIN_PATH, {"hash": hashes[0]}) == {"unpinned": False}
    done(PIN_PATH, {"hashes": hashes})
    said = done(INVALIDATE_PATH, {"hashes": hashes})
    assert (said["dropped"]["HBM"] + said["in_use_blocks"], said["unpinned"]) == (1, hashes)
    done(PIN_PATH, {"hashes": [hashes[0]], "ttl_s": 0.2})
    eventually(lambda: get(instance.url + PREFIXES_PATH).body["pins"] == [], 60.0, "a pin outlives its time")


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (PIN_PATH, {"hashes": ["00" * 15]}, "32 hex digits"),
        (PIN_PATH, {"hashes": []}, "1 to 10000"),
        (PIN_PATH, {"hashes": ["00" * 16], "ttl_s": 0}, "ttl_s"),
        (PIN_PATH, {"hashes": ["00" * 16], "tll": 1}, "tll"),
        (PIN_PATH, {"hashes": [f"{number:032x}" for number in range(40)]}, "40 would be pinned then, and at most"),
        (UNPIN_PATH, {"hash": "x"}, "hash: 'x'"),
        (UNPIN_PATH, b"{", "allowed: hash"),
        (INVALIDATE_PATH, {}, "hashes"),
    ],
)
def test_a_bad_word_about_prefixes_is_named_with_what_is_allowed(
    instance: TieredInstance, path: str, body: bytes | dict[str, Any], why: str
) -> None:
    assert why in refusal(send(instance.url + path, "POST", body))


@pytest.mark.parametrize(
    ("query", "why"),
    [("limit=0", ">= 1"), ("limit=x", "limit"), ("tier=TAPE", "TAPE"), ("teir=DDR", "teir")],
)
def test_a_bad_question_for_blocks_is_named(instance: TieredInstance, query: str, why: str) -> None:
    assert why in refusal(get(f"{instance.url}{BLOCKS_PATH}?{query}"))


def test_blocks_are_moved_by_hash(instance: TieredInstance) -> None:
    on_disk = get(f"{instance.url}{BLOCKS_PATH}?tier=NVME&limit=10000").body["blocks"]
    only = [block["hash"] for block in on_disk if block["tiers"] == ["NVME"]][:5]
    assert only
    answer = send(instance.url + MIGRATE_PATH, "POST", {"hashes": [*only, "00" * 16], "tier": "DDR"})
    assert answer.body == {"started": len(only), "unknown": ["00" * 16]}
    answer = send(instance.url + MIGRATE_PATH, "POST", {"hashes": only, "tier": "NVME"})
    assert answer.body == {"started": len(only), "unknown": []}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "hashes"),
        (b"{", "invalid request"),
        (b'\xff{"hashes"', "invalid request"),
        ({"hashes": [], "tier": "DDR"}, "length >= 1"),
        ({"hashes": ["zz"], "tier": "DDR"}, "'zz' is no name of a block; it is 32 hex digits"),
        ({"hashes": ["00"], "tier": "DDR"}, "'00' is no name of a block"),
        ({"hashes": ["00"], "tier": "HBM"}, "HBM"),
        ({"hashes": ["00"], "tier": "DDR", "force": True}, "force"),
    ],
)
def test_a_bad_migration_is_named(instance: TieredInstance, body: bytes | dict[str, Any], why: str) -> None:
    assert why in refusal(send(instance.url + MIGRATE_PATH, "POST", body))


def test_a_body_without_an_end_is_refused(instance: TieredInstance) -> None:
    assert "1048576" in refusal(send(instance.url + MIGRATE_PATH, "POST", b" " * (1 << 21)), status=413)


def test_quotas_are_set_read_and_taken_back(instance: TieredInstance) -> None:
    before = get(instance.url + QUOTAS_PATH).body
    assert before["tiers"]["DDR"]["shared"]["used_blocks"] > 0
    quota = {"guaranteed_bytes": 8 * BLOCK_BYTES, "burst_bytes": 32 * BLOCK_BYTES, "weight": 2.0}
    answer = send(instance.url + QUOTAS_PATH, "PUT", {"tenant": SOMEBODY, "tier": "DDR", "quota": quota})
    assert answer.body["tiers"]["DDR"][SOMEBODY]["quota"] == quota
    assert get(instance.url + QUOTAS_PATH).body["tiers"]["DDR"][SOMEBODY]["quota"] == quota
    answer = send(instance.url + QUOTAS_PATH, "PUT", {"tenant": SOMEBODY, "tier": "DDR", "quota": None})
    assert answer.status == 200
    assert answer.body["tiers"]["DDR"].get(SOMEBODY, {"quota": {"weight": 1.0}})["quota"]["weight"] == 1.0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tier": "DDR", "quota": None}, "tenant"),
        ({"tenant": "acme", "tier": "DDR", "quota": None}, "shared, or a digest of a salt: 16 hex digits"),
        ({"tenant": SOMEBODY, "tier": "HBM", "quota": {}}, "no HBM tier; it has DDR, NVME"),
        ({"tenant": SOMEBODY, "tier": "DDR", "quota": {"weight": 0}}, "weight"),
        ({"tenant": SOMEBODY, "tier": "DDR", "quota": {"guaranteed_bytes": 20, "burst_bytes": 10}}, "burst"),
        ({"tenant": SOMEBODY, "tier": "DDR", "quota": {"guaranteed_bytes": 1 << 50}}, "guarantee"),
    ],
)
def test_a_bad_quota_is_named_and_changes_nothing(instance: TieredInstance, change: dict[str, Any], why: str) -> None:
    before = get(instance.url + QUOTAS_PATH).body
    assert why in refusal(send(instance.url + QUOTAS_PATH, "PUT", change))
    assert get(instance.url + QUOTAS_PATH).body == before


def test_metrics_tell_of_every_tier_and_path(instance: TieredInstance) -> None:
    text = get(f"{instance.url}/metrics").raw.decode()
    for line in (
        'kvgate_engine_tier_capacity_blocks{tier="DDR"} 64.0',
        'kvgate_engine_tier_capacity_blocks{tier="NVME"} 512.0',
        "kvgate_engine_offload_guard_errors_total 0.0",
        "kvgate_engine_offload_failed_loads_total 0.0",
        'kvgate_engine_path_failed_blocks_total{path="ddr_to_hbm"} 0.0',
    ):
        assert line in text
    offload = get(instance.url + STATS_PATH).body["offload"]
    assert offload["loads"] > 0
    assert f"kvgate_engine_offload_loads_total {float(offload['loads'])}" in text


def test_operators_may_do_anything_while_requests_are_loaded_and_saved(instance: TieredInstance) -> None:
    expected = [instance.ask(text, new_tokens=4).tokens for text in TEXTS]
    chooser = random.Random(9)  # noqa: S311 - what is done when
    stop = threading.Event()
    done: Counter[str] = Counter()

    def operate() -> None:
        while not stop.wait(0.02):
            what = chooser.choice(["DDR", "NVME", "quota", "list", "reset"])
            if what in {"DDR", "NVME"}:
                blocks = get(f"{instance.url}{BLOCKS_PATH}?limit=200").body["blocks"]
                names = [block["hash"] for block in blocks] or ["00" * 16]
                answer = send(instance.url + MIGRATE_PATH, "POST", {"hashes": names, "tier": what})
            elif what == "quota":
                quota = {"burst_bytes": chooser.choice([4, 40, 64]) * BLOCK_BYTES}
                answer = send(instance.url + QUOTAS_PATH, "PUT", {"tenant": "shared", "tier": "DDR", "quota": quota})
            elif what == "list":
                answer = get(f"{instance.url}{BLOCKS_PATH}?tier=NVME&limit=10000")
            else:
                answer = send(instance.url + RESET_PATH, "POST", b"")
            assert answer.status in {200, 503}, answer  # 503: busy, on cores that others use too
            done[what] += answer.status == 200

    with ThreadPoolExecutor(7) as clients:
        operators = [clients.submit(operate) for _ in range(2)]
        visits = [chooser.randrange(len(TEXTS)) for _ in range(150)]
        try:
            answers = list(clients.map(lambda place: instance.ask(TEXTS[place], new_tokens=4), visits))
        finally:
            stop.set()
        for each in operators:
            each.result(60)
    assert [answer.tokens for answer in answers] == [expected[place] for place in visits]
    assert set(done) == {"DDR", "NVME", "quota", "list", "reset"}
    assert min(done.values()) > 0, done
    send(instance.url + QUOTAS_PATH, "PUT", {"tenant": "shared", "tier": "DDR", "quota": None})
    eventually(lambda: nothing_is_held(instance), 60, "tiers in which every block that takes room is a cached one")
    offload = instance.offload
    assert (offload.guard_errors, offload.worker_faults) == (0, 0)
    for _ in range(2):  # and what is in the tiers afterwards is right
        assert [instance.ask(text, new_tokens=4).tokens for text in TEXTS] == expected


def nothing_is_held(instance: TieredInstance) -> bool:
    stats = instance.stats()
    assert stats.offload is not None
    return not any(path.queued_blocks for path in stats.offload.paths.values()) and all(
        tier.used_blocks == tier.cached_blocks for tier in stats.tiers.values()
    )


def test_a_reset_forgets_all_tiers_and_says_how_much(instance: TieredInstance) -> None:
    total = get(f"{instance.url}{BLOCKS_PATH}").body["total"]
    answer = send(instance.url + RESET_PATH, "POST", b"")
    assert answer.status == 200, answer
    assert answer.body["dropped"]["HBM"] > 0
    assert 0 < answer.body["dropped"]["DDR"] <= 64
    assert answer.body["dropped"]["NVME"] <= total
    assert get(f"{instance.url}{BLOCKS_PATH}").body["total"] == 0
    assert instance.ask(TEXTS[1], new_tokens=4).cached == 0


@pytest.mark.slow
def test_an_instance_without_tiers_says_how_to_get_them(tiny_llama: Path, tmp_path: Path) -> None:
    with Instance.start(tiny_llama, tmp_path / "log") as plain:
        for path in (BLOCKS_PATH, QUOTAS_PATH):
            assert "start it with KVGATE_ENGINE_DDR_BYTES" in refusal(get(plain.url + path))
        assert send(plain.url + RESET_PATH, "POST", b"").body == {"dropped": {"HBM": 0}}
        assert 'tier="DDR"' not in get(f"{plain.url}/metrics").raw.decode()
