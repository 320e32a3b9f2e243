"""Gateways that are each other's instances."""

from pathlib import Path
from typing import Any

from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import CHAT, chat, running_fleet
from tests.support.running_gateway import RunningGateway, eventually, running_gateway
from tests.support.scripted_engine import ScriptedEngine

IN_FLIGHT = 'kvgate_requests_in_flight{instance="%s"}'


async def ended(gateway: RunningGateway, *, stream: bool) -> tuple[int, Any, str | None]:
    async with gateway.post(CHAT, chat(stream=stream)) as answer:
        return answer.status, (await answer.json())["error"]["code"], answer.headers.get("x-should-retry")


async def test_a_request_that_goes_round_between_two_gateways_ends_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    async with running_fleet(tmp_path / "b", {"engine": ScriptedEngine()}, admin_key=ADMIN_KEY) as fleet:
        b, engine = fleet.gateway, fleet.engines["engine"]
        async with running_gateway(tmp_path / "a", instances=[{"id": "b", "url": b.url}]) as a:
            await a.usable(1)
            async with a.post(CHAT, chat()) as answer:  # a chain is none, as long as it leads to an engine
                assert answer.status == 200
            admin = Admin(b)
            await admin.ok("POST", "/instances", {"id": "a", "url": a.url})
            await b.usable(2)
            await admin.ok("POST", "/instances/engine/drain")
            for gateway in (a, b):
                for stream in (False, True):
                    assert await ended(gateway, stream=stream) == (508, "loop_detected", "false")
            assert len(engine.requests) == 1
            for gateway, other in ((a, "b"), (b, "a")):
                await gateway.counted(IN_FLIGHT % other, 0)
                series = 'kvgate_requests_total{operation="chat_completions",outcome="%s"}'
                total = [await gateway.metric(series % each) for each in ("upstream_error", "client_error", "refused")]
                assert sum(total) == 6, "of four requests each came by both, and those of one's own came back to it"
            await admin.ok("POST", "/instances/engine/resume")

            async def served() -> bool:
                async with b.post(CHAT, chat()) as answer:
                    return bool(answer.status == 200)

            await eventually(served)
