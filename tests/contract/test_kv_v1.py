"""What any engine's ``/kv/v1`` answers: a running LMDeploy instance and a simulated one, by the same requests."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.models.tiny import build_tiny
from kvcontrol.core.control import SNAPSHOT_PATH, STATS_PATH, InstanceStats, Snapshot
from kvcontrol.core.policy_control import POLICY_PATH, PolicyReport
from kvcontrol.core.prefix_control import INVALIDATE_PATH, PIN_PATH, PREFIXES_PATH, UNPIN_PATH, Pins
from kvcontrol.core.tenant import tenant_of_salt
from kvcontrol.core.tier_control import BLOCKS_PATH, MIGRATE_PATH, QUOTAS_PATH, RESET_PATH, BlockList, Quotas
from tests.support.instance import Instance
from tests.support.kv_events import Answer, answer_to, get, stats
from tests.support.processes import eventually
from tests.support.revisits import context
from tests.support.simulated_instance import SimulatedInstance

pytestmark = pytest.mark.engine

WITHIN_S = 120.0
BUSY = 503
TINY_BLOCK_BYTES = 8192
SOMEBODY = tenant_of_salt("somebody's salt")
NAME = "0" * 32
TEXTS = [context(seed, 60) for seed in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module", params=["lmdeploy", "sim"])
def url(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine with 64 blocks of HBM, 48 of DDR and 128 of NVMe, which has served some requests."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "lmdeploy":
        settings = {
            "KVGATE_ENGINE_DDR_BYTES": str(48 * TINY_BLOCK_BYTES),
            "KVGATE_ENGINE_NVME_PATH": str(folder),
            "KVGATE_ENGINE_NVME_BYTES": str(128 * TINY_BLOCK_BYTES),
        }
        options = ("--num-gpu-blocks", "64", "--session-len", "500")
        serving: Instance = Instance.start(model, folder / "log", *options, settings=settings)
    else:
        sizes = ("--hbm-blocks", "64", "--ddr-blocks", "48", "--nvme-blocks", "128", "--context-tokens", "500")
        serving = SimulatedInstance.serve(model, folder / "log", *sizes)
    with serving:
        serve(serving.url)
        yield serving.url


def serve(url: str) -> None:
    """Have requests computed whose blocks reach the tiers below."""
    for text in TEXTS:
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
        assert send(url + "/v1/chat/completions", "POST", body).status == 200
    eventually(lambda: get(url + BLOCKS_PATH).body["total"] > 8, WITHIN_S, "no block reached the tiers below HBM")


def send(url: str, method: str, body: bytes | dict[str, Any]) -> Answer:
    """Send a request; an engine on a machine under load may be too busy at first."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310 - our own
    answers: list[Answer] = []

    def is_answered() -> bool:
        answers.append(answer_to(request, WITHIN_S))
        return answers[-1].status != BUSY

    eventually(is_answered, WITHIN_S, "the engine never had time for the request")
    return answers[-1]


def refusal(answer: Answer, status: int = 400, code: str = "invalid_request_error") -> str:
    assert answer.status == status, answer
    error = answer.body["error"]
    assert error == {"message": error["message"], "type": code, "param": None, "code": code}
    return str(error["message"])


def swap(url: str, **change: Any) -> dict[str, dict[str, Any]]:
    answer = send(url + POLICY_PATH, "PUT", change)
    assert answer.status == 200, answer
    return {each["kind"]: each for each in answer.body["policies"]}


def shown(url: str) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in get(url + POLICY_PATH).body["policies"]}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (STATS_PATH, InstanceStats),
        (SNAPSHOT_PATH, Snapshot),
        (POLICY_PATH, PolicyReport),
        (BLOCKS_PATH, BlockList),
        (QUOTAS_PATH, Quotas),
        (PREFIXES_PATH, Pins),
    ],
)
def test_what_is_shown_has_every_field_of_its_body_and_no_other(url: str, path: str, kind: type[Any]) -> None:
    answer = get(url + path)
    assert answer.status == 200, answer
    assert msgspec.json.decode(msgspec.json.encode(msgspec.json.decode(answer.raw, type=kind))) == answer.body


def test_a_route_has_its_methods_and_no_other(url: str) -> None:
    for path, method in ((BLOCKS_PATH, "POST"), (POLICY_PATH, "DELETE"), (MIGRATE_PATH, "PUT"), (RESET_PATH, "PUT")):
        assert send(url + path, method, b"").status == 405


@pytest.mark.parametrize(
    ("path", "method", "limit"),
    [
        (POLICY_PATH, "PUT", 1 << 16),
        (QUOTAS_PATH, "PUT", 1 << 20),
        (MIGRATE_PATH, "POST", 1 << 20),
        (PIN_PATH, "POST", 1 << 20),
        (INVALIDATE_PATH, "POST", 1 << 20),
    ],
)
def test_a_body_is_read_up_to_a_limit(url: str, path: str, method: str, limit: int) -> None:
    assert send(url + path, method, b" " * limit).status == 400
    answer = send(url + path, method, b" " * (limit + 1))
    assert refusal(answer, 413, "request_too_large") == f"the body is longer than {limit} bytes"


def test_policies_of_every_tier_are_swapped_and_counted_once(url: str) -> None:
    for kind, tier in (("eviction", "HBM"), ("eviction:ddr", "DDR"), ("eviction:nvme", "NVME")):
        before = shown(url)[kind]["eviction"]["swaps"]
        for _ in range(2):
            report = swap(url, kind=kind, name="mq", params={"lifetime": 2})[kind]
            assert (report["name"], report["params"]) == ("mq", {"lifetime": 2.0})
            assert report["effective_params"].keys() > {"lifetime"}
            assert (report["eviction"]["tier"], report["eviction"]["swaps"]) == (tier, before + 1)
            assert report["eviction"]["unit"] == ("tokens" if tier == "HBM" else "blocks")
        swap(url, kind=kind, name="lru")


def test_a_change_with_an_older_fence_of_a_store_is_refused_and_changes_nothing(url: str) -> None:
    def change(number: int, name: str, store: str = "one", **more: Any) -> Answer:
        return send(url + POLICY_PATH, "PUT", {"name": name, "fence": {"store": store, "number": number}, **more})

    for kind in ("eviction", "eviction:ddr", "schedule", "shadow"):
        old, new = {"schedule": ("fifo", "hybrid"), "shadow": ("lru", "lru,fifo")}.get(kind, ("lru", "fifo"))
        assert change(5, new, kind=kind).status == 200
        assert change(5, new, kind=kind).status == 200
        refused = refusal(change(4, old, kind=kind), 409, "stale_fence")
        assert refused.startswith(f"a newer change of kind '{kind}' came before this one: the fence 4 of store 'one'")
        assert shown(url)[kind]["name"] == new
        assert get(url + POLICY_PATH).body["fences"][kind]["one"] == 5
        assert change(1, old, "two", kind=kind).status == 200
        assert swap(url, kind=kind, name=new)[kind]["name"] == new  # without a fence
        assert change(6, old, kind=kind).status == 200
    refusal(change(4, "fifo", kind="eviction", tier="ddr"), 409, "stale_fence")
    refusal(change(9, "no such policy", kind="eviction"))
    refusal(change(8, "fifo", kind="eviction"), 409, "stale_fence")
    for wrong in ({"store": "one", "number": -1}, {"store": "one"}, {"store": "one", "number": 1, "more": 1}):
        refusal(send(url + POLICY_PATH, "PUT", {"kind": "eviction", "name": "fifo", "fence": wrong}))


def test_the_policy_before_the_first_change_is_reported_for_each_kind_that_was_changed(url: str) -> None:
    def first(kind: str) -> Any:
        return get(url + POLICY_PATH).body["first"].get(kind)

    for kind, names in (("eviction", ("fifo", "lru")), ("shadow", ("lru,fifo", "")), ("schedule", ("hybrid", "fifo"))):
        running = shown(url)[kind]
        before = first(kind) or {"name": running["name"], "params": running["params"]}
        for name in names:
            swap(url, kind=kind, name=name)
            assert first(kind) == before


def test_the_tier_of_an_eviction_policy_may_stand_beside_its_kind(url: str) -> None:
    assert swap(url, kind="eviction", name="fifo", tier="ddr")["eviction:ddr"]["name"] == "fifo"
    assert swap(url, kind="eviction", name="lru", tier="DDR")["eviction:ddr"]["name"] == "lru"


def test_an_adaptive_policy_reports_what_it_follows(url: str) -> None:
    report = swap(url, kind="eviction", name="adaptive")["eviction"]["eviction"]
    assert report["adaptive"].keys() == {"weight", "follows", "hits", "lru_hits", "behind_blocks", "switches"}
    assert swap(url, kind="eviction", name="lru")["eviction"]["eviction"]["adaptive"] is None


def test_shadows_follow_while_they_are_named_alike(url: str) -> None:
    assert swap(url, kind="shadow", name="lru, mq( lifetime=2 )")["shadow"]["name"] == "lru,mq(lifetime=2)"
    followed = [each["policy"] for each in shown(url)["shadow"]["shadow"]["standings"]]
    assert followed == ["lru", "mq(lifetime=2)"]
    assert swap(url, kind="shadow", name="")["shadow"]["shadow"]["standings"] == []


def test_a_strategy_of_the_schedule_is_swapped_and_counted_once(url: str) -> None:
    before = swap(url, kind="schedule", name="hybrid")["schedule"]["schedule"]["swaps"]  # whichever was in charge
    for _ in range(2):
        report = swap(url, kind="schedule", name="fifo")["schedule"]
        assert (report["name"], report["schedule"]["swaps"]) == ("fifo", before + 1)
    assert swap(url, kind="schedule", name="hybrid")["schedule"]["name"] == "hybrid"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (b"no json", "invalid body"),
        (b"{", "truncated"),
        ({"kind": "eviction"}, "missing required field `name`"),
        ({"kind": "eviction", "name": "lru", "more": 1}, "unknown field `more`"),
        ({"kind": "eviction", "name": "best"}, "unknown policy 'best'"),
        ({"kind": "eviction", "name": "mq", "params": {"lifetime": 0}}, "lifetime is 0; allowed is"),
        ({"kind": "eviction", "name": "mq", "params": {"lifetime": "2"}}, "lifetime is '2'; policies take numbers"),
        ({"kind": "eviction", "name": "mq", "params": {"lifetime": True}}, "lifetime is True; policies take numbers"),
        ({"kind": "eviction", "name": "mq", "params": {"lifetime": 10**400}}, "lifetime"),
        ({"kind": "eviction", "name": "lru", "tier": "tape"}, "unknown tier 'tape'; tiers of this instance: HBM, DDR"),
        ({"kind": "eviction:ddr", "name": "lru", "tier": "ddr"}, "names a tier already; leave out tier 'ddr'"),
        ({"kind": "routing", "name": "lru"}, "this instance has eviction, eviction:ddr, eviction:nvme, shadow"),
        ({"kind": "shadow", "name": "lru,best"}, "unknown policy 'best'"),
        ({"kind": "shadow", "name": "lru", "params": {"x": 1}}, "shadow policies have no params and no tier"),
        ({"kind": "schedule", "name": "best"}, "unknown strategy 'best'"),
        ({"kind": "schedule", "name": "fifo", "tier": "ddr"}, "a strategy of the schedule has no tier"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_and_changes_nothing(
    url: str, change: bytes | dict[str, Any], why: str
) -> None:
    def running() -> dict[str, Any]:
        return {kind: (each["name"], each["params"]) for kind, each in shown(url).items()}

    before = running()
    assert why in refusal(send(url + POLICY_PATH, "PUT", change))
    assert running() == before


def test_quotas_are_set_in_bytes_and_taken_back(url: str) -> None:
    size = stats(url).tiers["DDR"].block_bytes  # type: ignore[index]  # a string enum
    quota = {"guaranteed_bytes": 2 * size, "burst_bytes": 4 * size, "weight": 2.0}
    wanted = {"tenant": SOMEBODY, "tier": "DDR"}
    answer = send(url + QUOTAS_PATH, "PUT", wanted | {"quota": quota})
    assert answer.body["tiers"]["DDR"][SOMEBODY]["quota"] == quota
    assert SOMEBODY not in send(url + QUOTAS_PATH, "PUT", wanted | {"quota": None}).body["tiers"]["DDR"]


def test_a_quota_that_is_no_whole_number_of_blocks_is_taken(url: str) -> None:
    size = stats(url).tiers["DDR"].block_bytes  # type: ignore[index]  # a string enum
    wanted = {"tenant": SOMEBODY, "tier": "DDR"}
    quota = {"guaranteed_bytes": size + 1, "burst_bytes": size + 1}
    answer = send(url + QUOTAS_PATH, "PUT", wanted | {"quota": quota})
    assert answer.status == 200, answer
    assert answer.body["tiers"]["DDR"][SOMEBODY]["quota"]["guaranteed_bytes"] >= size + 1
    assert send(url + QUOTAS_PATH, "PUT", wanted | {"quota": None}).status == 200


ALLOWED_QUOTA = "allowed: tenant (shared, or a digest of a salt: 16 hex digits), tier"


@pytest.mark.parametrize(
    ("body", "why", "allowed"),
    [
        ({"tenant": SOMEBODY, "quota": None}, "missing required field `tier`", ALLOWED_QUOTA),
        ({"tenant": "acme", "tier": "DDR", "quota": None}, "at `$.tenant`", ALLOWED_QUOTA),
        ({"tenant": SOMEBODY, "tier": "DDR", "quota": {"weight": 0}}, "> 0", ALLOWED_QUOTA),
        ({"tenant": SOMEBODY, "tier": "REMOTE", "quota": None}, "no REMOTE tier", "it has DDR, NVME"),
        (
            {"tenant": SOMEBODY, "tier": "DDR", "quota": {"guaranteed_bytes": 20, "burst_bytes": 10}},
            "burst_bytes is 10",
            "must be >= guaranteed_bytes (20)",
        ),
    ],
)
def test_a_quota_that_cannot_be_is_refused_with_what_is_allowed(
    url: str, body: dict[str, Any], why: str, allowed: str
) -> None:
    before = get(url + QUOTAS_PATH).body
    message = refusal(send(url + QUOTAS_PATH, "PUT", body))
    assert why in message
    assert allowed in message
    assert get(url + QUOTAS_PATH).body["tiers"].keys() == before["tiers"].keys()


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=10001", "limit=%2B5", "limit=1.5", "limit=x", "tier=TAPE", "teir=DDR"]
)
def test_a_query_for_blocks_that_is_not_allowed_is_refused_with_what_is(url: str, query: str) -> None:
    message = refusal(get(f"{url}{BLOCKS_PATH}?{query}"))
    assert "allowed: limit (1 to 10000), tier (DDR or NVME) and tenant" in message


def test_blocks_are_listed_and_moved_by_name(url: str) -> None:
    size = stats(url).tiers["DDR"].block_bytes  # type: ignore[index]  # a string enum
    listed = get(f"{url}{BLOCKS_PATH}?limit=2&tier=DDR").body
    assert listed["total"] >= len(listed["blocks"]) == 2
    assert {each["size_bytes"] for each in listed["blocks"]} == {size}
    hashes = [each["hash"] for each in listed["blocks"]]
    moved = send(url + MIGRATE_PATH, "POST", {"hashes": [*hashes, hashes[0].upper(), "f" * 32], "tier": "NVME"})
    assert moved.body == {"started": 2, "unknown": ["f" * 32]}


@pytest.mark.parametrize(
    ("body", "why", "allowed"),
    [
        (b"", "missing required field `hashes`", "allowed: hashes (1 to 10000 names of blocks, 32 hex digits each)"),
        ({"hashes": [], "tier": "DDR"}, "length >= 1", "allowed: hashes (1 to 10000 names of blocks"),
        ({"hashes": [NAME, "zz"], "tier": "DDR"}, "hashes: 'zz' is no name of a block", "it is 32 hex digits"),
        ({"hashes": [NAME], "tier": "HBM"}, "no HBM tier", "it has DDR, NVME"),
    ],
)
def test_a_migration_that_cannot_be_is_refused_with_what_is_allowed(
    url: str, body: bytes | dict[str, Any], why: str, allowed: str
) -> None:
    message = refusal(send(url + MIGRATE_PATH, "POST", body))
    assert why in message
    assert allowed in message


def test_a_prefix_is_pinned_shown_unpinned_and_forgotten(url: str) -> None:
    head = get(f"{url}{BLOCKS_PATH}?limit=1").body["blocks"][0]["hash"]
    pin = send(url + PIN_PATH, "POST", {"hashes": [head], "ttl_s": 600})
    assert pin.status == 200, pin
    assert pin.body["hash"] == head
    assert 0 < pin.body["left_s"] <= 600
    held = get(url + PREFIXES_PATH).body
    assert [each["hash"] for each in held["pins"]] == [head]
    assert 0 < held["pinned_blocks"] <= held["limit_blocks"]
    assert held["errors"] == 0
    again = send(url + PIN_PATH, "POST", {"hashes": [head]})
    assert again.body["left_s"] is None
    forgotten = send(url + INVALIDATE_PATH, "POST", {"hashes": [head]})
    assert forgotten.body["unpinned"] == [head]
    assert get(url + PREFIXES_PATH).body["pins"] == []
    assert send(url + UNPIN_PATH, "POST", {"hash": head}).body == {"unpinned": False}


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (PIN_PATH, {"hashes": []}, "allowed: hashes (1 to 10000 names of blocks in prompt order"),
        (PIN_PATH, {"hashes": [NAME], "ttl_s": 0}, "above 0 to 3.16224e+07 seconds"),
        (PIN_PATH, {"hashes": ["zz"]}, "hashes: 'zz' is no name of a block"),
        (UNPIN_PATH, {"hash": "zz"}, "hash: 'zz' is no name of a block"),
        (UNPIN_PATH, {}, "allowed: hash (what a pin is called"),
        (INVALIDATE_PATH, {"hashes": [NAME], "all": True}, "unknown field `all`"),
    ],
)
def test_a_pin_that_cannot_be_is_refused_with_what_is_allowed(
    url: str, path: str, body: dict[str, Any], why: str
) -> None:
    assert why in refusal(send(url + path, "POST", body))


def test_more_pins_than_leave_room_are_refused_with_the_limit(url: str) -> None:
    limit = get(url + PREFIXES_PATH).body["limit_blocks"]
    names = [f"{number:032x}" for number in range(1, limit + 2)]
    message = refusal(send(url + PIN_PATH, "POST", {"hashes": names}))
    assert f"a prefix of {limit + 1} blocks can't be pinned" in message
    assert f"at most {limit} may be" in message


def test_a_reset_forgets_every_tier_and_what_is_served_then_is_cached_anew(url: str) -> None:
    answer = send(url + RESET_PATH, "POST", b"")
    assert answer.body["dropped"].keys() == {"HBM", "DDR", "NVME"}
    assert answer.body["dropped"]["HBM"] > 0
    assert get(url + BLOCKS_PATH).body == {"total": 0, "blocks": []}
    assert not any(get(url + SNAPSHOT_PATH).body["tiers"].values())
    serve(url)
