"""Calls to the store that share the time of one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from fastapi import FastAPI

from gateway.api.admin.access import AdminAccess, AdminRoute
from gateway.state import Action, Kind, Put, Store, StoreUnavailableError, open_sqlite
from gateway.state.budget import shared_store_time, store_time
from tests.support.stored_revision import revision_of

ACT = Action(actor="admin", action="put", target="tenants/acme")
LIMIT_S = 30.0


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = open_sqlite(tmp_path, limit_s=LIMIT_S)
    yield opened
    await opened.close()


async def test_the_times_of_a_tasks_calls_add_up(store: Store) -> None:
    with shared_store_time():
        await revision_of(store)
        first_s = store_time().spent_s
        await store.documents(Kind.TENANT)
        assert 0 < first_s < store_time().spent_s
    assert store_time().spent_s == 0


async def test_no_call_begins_once_the_time_of_one_is_used_up_and_nothing_is_changed(store: Store) -> None:
    with shared_store_time():
        store_time().spent_s = LIMIT_S
        with pytest.raises(StoreUnavailableError, match="took more than 30 s for earlier calls; this call was"):
            await store.apply([Put(kind=Kind.TENANT, name="acme", body="{}")], action=ACT)
    assert list(await store.documents(Kind.TENANT)) == []


async def test_a_task_that_is_started_meanwhile_has_its_own_time(store: Store) -> None:
    with shared_store_time():
        store_time().spent_s = LIMIT_S
        assert (await asyncio.create_task(revision_of(store))).number == 0


async def test_an_admin_request_shares_the_time_of_its_calls() -> None:
    app = FastAPI()
    app.state.admin_access = AdminAccess("admin-key")
    app.router.route_class = AdminRoute

    @app.get("/shared")
    async def shared() -> bool:
        return store_time() is store_time()

    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://gateway") as client:
        answer = await client.get("/shared", headers={"authorization": "Bearer admin-key"})
    assert answer.json() is True
    assert store_time() is not store_time()
