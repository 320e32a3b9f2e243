"""With ``auto_policy`` the gateway swaps the whole fleet on evidence, and what it does is in the audit log."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import Fleet, running_fleet
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import ScriptedEngine

FAST = {"shadow_period_s": 0.01, "auto_policy_dwell_s": 0.01}


class Served:
    """Engines whose shadow policies see requests all the time; ``hits`` of 100 look-ups, by candidate."""

    def __init__(self, engines: dict[str, ScriptedEngine], **hits: int) -> None:
        self._engines = engines
        self._lookups = 0
        self._found = dict.fromkeys(hits, 0)
        self.hits = hits

    async def serve(self) -> None:
        while True:
            self._lookups += 100
            standings = []
            for name, hits in self.hits.items():
                self._found[name] += hits
                found, asked = self._found[name], self._lookups
                standings.append(
                    {"policy": name, "lookups": asked, "hits": found, "hit_ratio": found / asked}
                    | {"window_hit_ratio": None}
                )
            shadow = {"standings": standings, "window_s": 1.0, "sampled_ratio": 1.0, "requests": 9}
            shadow |= {"skipped_requests": 0, "busy_s": 0.1}
            for engine in self._engines.values():
                engine.policies["shadow"] = {"kind": "shadow", "name": "", "params": {}, "shadow": shadow}
            await asyncio.sleep(0.005)


@asynccontextmanager
async def served(tmp_path: Path, settings: dict[str, Any], **hits: int) -> AsyncIterator[tuple[Fleet, Admin, Served]]:
    engines = {"a": ScriptedEngine(), "b": ScriptedEngine()}
    traffic = Served(engines, **hits)
    async with running_fleet(tmp_path, engines, admin_key=ADMIN_KEY, **settings) as fleet:
        serving = asyncio.create_task(traffic.serve())
        try:
            yield fleet, Admin(fleet.gateway), traffic
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


def running(fleet: Fleet) -> list[str]:
    return [engine.policies["eviction"]["name"] for engine in fleet.engines.values()]


async def test_the_fleet_follows_a_shadow_that_is_ahead_and_goes_back_when_that_was_wrong(tmp_path: Path) -> None:
    settings = FAST | {"auto_policy": True, "auto_policy_dwell_s": 2.0}
    async with served(tmp_path, settings, lru=20, s3fifo=40) as (fleet, admin, traffic):
        await eventually(lambda: running(fleet) == ["s3fifo", "s3fifo"])
        traffic.hits = {"lru": 60, "s3fifo": 20}
        await eventually(lambda: running(fleet) == ["lru", "lru"])

        async def ended() -> bool:
            return len((await admin.ok("GET", "/audit"))["data"]) == 2

        await eventually(ended)
        entries = (await admin.ok("GET", "/audit"))["data"][::-1]
        assert [(each["actor"], each["action"], each["outcome"]) for each in entries] == [("auto", "swap", "done")] * 2
        assert "s3fifo found +" in entries[0]["detail"]["reason"]
        assert (await admin.ok("GET", "/policies/eviction"))["name"] == "lru"


async def test_without_the_flag_the_evidence_is_shown_and_nothing_is_swapped(tmp_path: Path) -> None:
    async with served(tmp_path, FAST, lru=20, s3fifo=40, arc=20) as (fleet, admin, _):

        async def proven() -> bool:
            leads = (await admin.ok("GET", "/policies/shadow"))["leads"]
            return [(each["policy"], each["verdict"]) for each in leads] == [("s3fifo", "ahead"), ("arc", "tie")]

        await eventually(proven)
        assert not (await admin.ok("GET", "/policies/shadow"))["auto"]
        assert running(fleet) == ["lru", "lru"]
        assert (await admin.ok("GET", "/audit"))["data"] == []


async def test_a_swap_that_one_instance_refuses_is_made_nowhere(tmp_path: Path) -> None:
    async with served(tmp_path, FAST | {"auto_policy": True}, lru=20, s3fifo=40) as (fleet, admin, _):
        fleet.engines["b"].refused_policies.add("s3fifo")

        async def refused() -> bool:
            entries = (await admin.ok("GET", "/audit"))["data"]
            return any(each["outcome"] == "rolled_back" for each in entries)

        await eventually(refused)
        await eventually(lambda: running(fleet) == ["lru", "lru"])
        assert fleet.engines["b"].policies["eviction"]["name"] == "lru"
        assert (await admin.call("GET", "/policies/eviction"))[0] == 404
