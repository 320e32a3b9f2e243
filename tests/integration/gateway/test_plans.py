"""An operator looks at the plans that requests are served by, and ends one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.admin import ADMIN_KEY, Admin, locked_store
from tests.support.fleet import COMPLETIONS, Fleet, running_fleet
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import MODEL, Script, ScriptedEngine


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path, {"a": ScriptedEngine()}, admin_key=ADMIN_KEY) as running:
        yield running


async def running(admin: Admin) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await admin.ok("GET", "/plans"))["data"]
    return found


async def cancel_the_only_one(fleet: Fleet, admin: Admin) -> dict[str, Any]:
    await eventually(lambda: fleet.engines["a"].active == 1)
    [plan] = await running(admin)
    assert (plan["state"], plan["instance"], plan["legs"]) == (
        "running",
        "a",
        [{"kind": "answer", "instance": "a", "transport": None}],
    )
    cancelled: dict[str, Any] = await admin.ok("DELETE", f"/plans/{plan['id']}?reason=maintenance")
    assert (cancelled["state"], cancelled["reason"]) == ("cancelled", "maintenance")
    return cancelled


async def test_a_request_that_waits_for_its_answer_is_refused_and_its_engine_stops(fleet: Fleet) -> None:
    admin = Admin(fleet.gateway)
    fleet.engines["a"].default = Script(ttft_s=300)
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 4}

    async def ask() -> tuple[int, str | None, Any]:
        async with fleet.gateway.post(COMPLETIONS, body) as answer:
            return answer.status, answer.headers.get("x-should-retry"), await answer.json()

    asked = asyncio.create_task(ask())
    plan = await cancel_the_only_one(fleet, admin)
    status, again, said = await asked
    assert (status, again) == (503, "false")
    assert said["error"]["code"] == "cancelled"
    assert "maintenance" in said["error"]["message"]
    await eventually(lambda: fleet.engines["a"].active == 0)
    assert await running(admin) == []
    detail = await admin.ok("GET", f"/plans/{plan['id']}")
    assert (detail["state"], detail["reason"]) == ("cancelled", "maintenance")
    assert "decode" in detail["graph"]
    await fleet.gateway.counted('kvgate_requests_total{operation="completions",outcome="cancelled"}', 1)
    audited = (await admin.ok("GET", "/audit"))["data"]
    assert any(each["action"] == "cancel" and each["target"] == f"plans/{plan['id']}" for each in audited)
    late = await admin.ok("DELETE", f"/plans/{plan['id']}?reason=again")
    assert late["reason"] == "maintenance"


async def test_a_stream_ends_in_an_error_event(fleet: Fleet) -> None:
    fleet.engines["a"].default = Script(chunks=1000, chunk_s=0.05)
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1000, "stream": True}
    async with fleet.gateway.post(COMPLETIONS, body) as answer:
        await answer.content.readany()
        await cancel_the_only_one(fleet, Admin(fleet.gateway))
        rest = await answer.content.read()
    assert b'"cancelled"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    await eventually(lambda: fleet.engines["a"].active == 0)


async def test_a_plan_is_not_cancelled_while_the_audit_log_can_not_be_written(tmp_path: Path) -> None:
    settings = {"admin_key": ADMIN_KEY, "store_timeout_s": 2.0}
    async with running_fleet(tmp_path, {"a": ScriptedEngine()}, **settings) as fleet:
        admin, engine = Admin(fleet.gateway), fleet.engines["a"]
        engine.gate = asyncio.Event()

        async def ask() -> int:
            async with fleet.gateway.post(COMPLETIONS, {"model": MODEL, "prompt": [1, 2, 3]}) as answer:
                return int(answer.status)

        asked = asyncio.create_task(ask())
        await eventually(lambda: engine.active == 1)
        [plan] = await running(admin)
        with locked_store(tmp_path):
            status, _, said = await admin.call("DELETE", f"/plans/{plan['id']}")
        assert (status, said["error"]["code"]) == (503, "store_unavailable")
        assert (await running(admin))[0]["state"] == "running"
        assert (await admin.ok("GET", "/audit"))["data"] == []
        engine.gate.set()
        assert await asked == 200


async def test_a_plan_that_is_done_is_shown_and_cancelling_it_changes_nothing(fleet: Fleet) -> None:
    async with fleet.gateway.post(COMPLETIONS, {"model": MODEL, "prompt": [1, 2, 3], "stream": True}) as answer:
        await answer.content.readany()
        admin = Admin(fleet.gateway)
        await answer.content.read()
    fleet.engines["a"].default = Script(ttft_s=300)
    asked = asyncio.create_task(fleet.gateway.post(COMPLETIONS, {"model": MODEL, "prompt": [1, 2, 3]}).__aenter__())
    await eventually(lambda: fleet.engines["a"].active == 1)
    [plan] = await running(admin)
    first = plan["id"].removesuffix("-2") + "-1"
    for method in ("GET", "DELETE"):
        done = await admin.ok(method, f"/plans/{first}")
        assert (done["id"], done["state"], done["done"], done["reason"]) == (first, "done", 1, "")
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await eventually(lambda: fleet.engines["a"].active == 0)
    left = await admin.ok("GET", f"/plans/{plan['id']}")
    assert (left["state"], left["reason"]) == ("cancelled", "its client left, or its time was over")


async def test_what_is_unknown_is_a_404(fleet: Fleet) -> None:
    for method in ("GET", "DELETE"):
        status, _, said = await Admin(fleet.gateway).call(method, "/plans/plan-0")
        assert status == 404
        assert "plan-0" in said["error"]["message"]
