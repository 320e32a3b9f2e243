"""``kvgate up`` with several engines that prefill or several that decode: answers as one engine gives them alone, work
for all of them, and nothing left behind.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from kvcontrol.core.control import InstanceStats
from kvcontrol.core.roles import KVTransport
from kvgate.host.ports import free_ports
from tests.support import kv_events
from tests.support.pd_gateway import body_of
from tests.support.pd_pair import Answer, at_once, streamed, whole
from tests.support.processes import eventually, running

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT_S = 240.0
LETTERS = (10, 300, 900, 1500)
SHORT, LONG = LETTERS[0], LETTERS[1:]
COUNT = 20


class Told(NamedTuple):
    answer: Answer
    route: str
    instance: str


def ask(url: str, body: dict[str, Any]) -> Told:
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    found = streamed(answer.text) if body.get("stream") else whole(answer.json())
    return Told(found, answer.headers.get("x-kvgate-route", ""), answer.headers.get("x-kvgate-instance", ""))


def stats(urls: dict[str, str]) -> dict[str, InstanceStats]:
    return {name: kv_events.stats(url) for name, url in urls.items()}


def is_idle(urls: dict[str, str]) -> bool:
    """Whether no request has a block anywhere: all that is used is cached."""
    return all(tier.used_blocks == tier.cached_blocks for each in stats(urls).values() for tier in each.tiers.values())


@pytest.mark.parametrize("transport", KVTransport)
@pytest.mark.parametrize(("topology", "prefills"), [("1p2d", 1), ("2p1d", 2)])
def test_every_engine_does_its_part_and_answers_are_those_of_one_alone(
    environment: dict[str, str], tmp_path: Path, topology: str, prefills: int, transport: KVTransport
) -> None:
    port = str(free_ports(1)[0])
    tiers = ("--ddr", "64MiB") if transport is KVTransport.TIERS else ()
    settings = {"KVGATE_PD_MIN_UNCACHED_TOKENS": "64", "KVGATE_ENGINE_PD_TRANSFER_TIMEOUT_S": "120"}
    with running(
        ["up", "--tiny", "--topology", topology, "--port", port, *tiers], tmp_path / "up.log", environment | settings
    ) as up:
        said = up.until_said("Ctrl-C stops everything")
        urls: dict[str, str] = dict(re.findall(r"^(engine-\d)\s+(http://\S+)\s+role: \w+", said, re.MULTILINE))
        assert len(urls) == 3
        prefilling, answering = list(urls)[:prefills], list(urls)[prefills:]
        bodies = [
            body_of(LETTERS[seed % len(LETTERS)], seed, model="tiny-llama", stream=seed % 3 == 0)
            for seed in range(COUNT)
        ]
        for body in bodies:
            if body["stream"]:
                body["stream_options"] = {"include_usage": True}
        told = at_once(lambda body: ask(f"http://127.0.0.1:{port}", body), bodies)
        for body, each in zip(bodies, told, strict=True):
            is_long = len(body["prompt"]) != SHORT
            assert ("pd=separated" if is_long else "pd=short") in each.route
        assert {each.instance for each in told} == set(answering)
        separated = [each.route for each in told if "pd=separated" in each.route]
        assert {route.rpartition("prefill=")[2] for route in separated} == set(prefilling)
        eventually(lambda: is_idle(urls), LIMIT_S, "no block in use")
        after = stats(urls)
        pd = {name: each.pd for name, each in after.items() if each.pd is not None}
        assert sum(pd[name].handed_over for name in prefilling) == len(separated)
        assert sum(pd[name].fetched for name in answering) == len(separated)
        assert all(not each.recomputed and not each.held_requests for each in pd.values())
        # By migration a prefilling engine answers nobody; through the tiers it alone has surely computed all itself.
        alone_at = urls[answering[0] if transport is KVTransport.MIGRATION else prefilling[0]]
        plain = [{key: value for key, value in body.items() if not key.startswith("stream")} for body in bodies]
        alone = at_once(lambda body: ask(alone_at, body).answer, plain)
        assert [each.answer.text for each in told] == [each.text for each in alone]
        assert [each.answer.usage["prompt_tokens"] for each in told] == [each.usage["prompt_tokens"] for each in alone]
        eventually(lambda: is_idle(urls), LIMIT_S, "no block in use")
