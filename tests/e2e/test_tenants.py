"""Two tenants on a real engine: neither finds what the other has cached; what an operator says of them reaches it."""

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from kvgate.admin.client import AdminClient, find_key
from kvgate.failure import CommandError
from kvgate.host.ports import free_ports
from tests.support.processes import eventually, running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = "the same long beginning of a prompt, word for word, " * 12


class Stack(NamedTuple):
    gateway: str
    engine: str
    admin: AdminClient

    def cached(self, key: str, prompt: str = PROMPT) -> int:
        """Ask, and return how many prompt tokens the engine found in its cache."""
        body = {"model": "tiny-llama", "messages": [{"role": "user", "content": prompt}], "max_tokens": 2}
        said = call(f"{self.gateway}/v1/chat/completions", body, {"authorization": f"Bearer {key}"})
        details = said["usage"]["prompt_tokens_details"]
        return 0 if details is None else int(details["cached_tokens"] or 0)

    def key(self, tenant: str) -> str:
        self.admin.call("PUT", f"/tenants/{tenant}", {})
        return str(self.admin.call("POST", "/keys", {"tenant": tenant}).body["key"])


def call(url: str, body: Any = None, headers: dict[str, str] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})})  # noqa: S310
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 - a server of this test
        told: dict[str, Any] = json.load(answer)
    return told


@pytest.fixture(scope="module")
def stack(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("tenants")
    port = free_ports(1)[0]
    options = ["--instances", "1", "--ddr", "8MiB", "--state-dir", str(folder / "state"), "--port", str(port)]
    with running(["up", "--tiny", "--device", "cpu", *options], folder / "up.log", environment, warm=2) as up:
        up.until_said("Ctrl-C stops everything")
        found = re.search(r"engine-0 +(http://\S+)", up.said)
        assert found, up.said
        gateway = f"http://127.0.0.1:{port}"
        yield Stack(gateway, found[1], AdminClient(gateway, find_key(None, folder / "state")))


def test_a_tenant_finds_its_own_cached_tokens_and_never_anothers(stack: Stack) -> None:
    acme, umbra = stack.key("acme"), stack.key("umbra")
    assert stack.cached(acme) == 0
    assert stack.cached(acme) > 0
    assert stack.cached(umbra) == 0
    assert stack.cached(umbra) > 0
    assert stack.cached(stack.key("acme")) > 0  # another key of the same tenant


def test_a_kv_budget_reaches_the_engines_quotas(stack: Stack) -> None:
    stack.key("budgeted")
    stack.admin.call("PUT", "/quotas/budgeted", {"kv": {"DDR": {"guaranteed_bytes": 0, "burst_bytes": 1 << 20}}})

    def bursts() -> list[int | None]:
        accounts = call(f"{stack.engine}/kv/v1/quotas")["tiers"]["DDR"]
        return [each["quota"]["burst_bytes"] for each in accounts.values()]

    eventually(lambda: 1 << 20 in bursts(), 60, "the budget on the engine")
    stack.admin.call("DELETE", "/quotas/budgeted")
    eventually(lambda: 1 << 20 not in bursts(), 60, "the budget taken back")


def test_a_reset_over_the_fleet_forgets_what_was_cached(stack: Stack) -> None:
    key = stack.key("resetting")
    stack.cached(key)
    assert stack.cached(key) > 0
    said = stack.admin.call("POST", "/prefix-cache/reset", {}).body
    assert said["failed"] == 0
    assert said["instances"]["engine-0"]["dropped"]["HBM"] > 0
    assert stack.cached(key) == 0


def policy_of(engine: str, kind: str) -> str:
    said = call(f"{engine}/kv/v1/policy")
    return next(str(each["name"]) for each in said["policies"] if each["kind"] == kind)


@pytest.mark.parametrize("kind", ["eviction", "eviction:ddr"])
def test_a_policy_is_swapped_while_blocks_stay_and_a_refused_one_changes_nothing(stack: Stack, kind: str) -> None:
    key = stack.key(f"swapping-{kind.replace(':', '-')}")
    prompt = f"cached before the policy of {kind} is swapped, " * 12
    stack.cached(key, prompt)
    before = stack.cached(key, prompt)
    assert before > 0
    said = stack.admin.call("PUT", f"/policies/{kind}", {"name": "s3fifo"}).body
    assert said["instances"]["engine-0"]["step"] == "changed"
    assert policy_of(stack.engine, kind) == "s3fifo"
    assert stack.cached(key, prompt) == before
    with pytest.raises(CommandError, match="no-such-policy"):
        stack.admin.call("PUT", f"/policies/{kind}", {"name": "no-such-policy"})
    assert policy_of(stack.engine, kind) == "s3fifo"
    assert stack.admin.call("GET", f"/policies/{kind}").body["name"] == "s3fifo"


def test_candidates_are_followed_beside_the_policy_in_charge(stack: Stack) -> None:
    stack.admin.call("PUT", "/policies/shadow", {"name": "lru,lfu"})
    key = stack.key("shadowed")
    for _ in range(3):
        stack.cached(key, "what candidates would have found of this prompt, " * 12)
    said = stack.admin.call("GET", "/policies/shadow").body
    assert {each["policy"] for each in said["candidates"]} == {"lru", "lfu"}
    assert said["instances"]["engine-0"]["problem"] is None
