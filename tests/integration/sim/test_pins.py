"""``/admin/v1/prefixes`` of a real gateway before simulated engines: what is pinned stays when memory is short."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engines.models.tiny import build_tiny
from engines.sim.faults import Faults
from engines.sim.text import SimTokenizer
from kvcontrol.core.blocks import CacheTier
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.running_gateway import RunningGateway
from tests.support.simulated_instance import Simulated, simulated_fleet

BLOCKS = 96
SYSTEM = "You answer in short words. " * 12
ASKED: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hello"}],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


async def ask(gateway: RunningGateway) -> tuple[str, int]:
    """Return who answered, and how many tokens were cached there."""
    async with gateway.post("/v1/chat/completions", ASKED | {"max_tokens": 1}) as answer:
        assert answer.status == 200, await answer.text()
        usage = (await answer.json())["usage"]
        return str(answer.headers["x-kvgate-instance"]), int(usage["prompt_tokens_details"]["cached_tokens"])


async def crowd(engine: Simulated, name: str) -> None:
    """Have an engine compute more than its memory holds, all of it new."""
    async with aiohttp.ClientSession(engine.url) as session:
        for number in range(12):
            body = {"prompt": f"{name} {number} {SYSTEM}", "max_tokens": 1}
            async with session.post("/generate", json=body) as answer:
                assert answer.status == 200, await answer.text()
    assert engine.instance.engine.pool.evicted_blocks


async def test_pins_of_the_gateway_hold_at_simulated_engines_until_they_end(model: Path, tmp_path: Path) -> None:
    quick = Faults(slow=0.02)
    async with simulated_fleet(
        SimTokenizer(model),
        model,
        tmp_path,
        {"a": quick, "b": quick},
        settings={"admin_key": ADMIN_KEY},
        hbm_blocks=BLOCKS,
        context_tokens=512,
    ) as (gateway, engines):
        admin = Admin(gateway)

        async def resident(name: str) -> None:
            """Wait until the gateway knows what an instance holds."""
            held = len((await engines[name].instance.snapshot()).hashes(CacheTier.HBM))
            await gateway.counted(f'kvgate_resident_blocks{{instance="{name}",tier="HBM"}}', held)

        home, _ = await ask(gateway)
        await resident(home)
        other = "b" if home == "a" else "a"
        pin = await admin.ok("POST", "/prefixes", ASKED | {"ttl_s": 3600})
        [(where, said)] = pin["instances"].items()
        blocks = said["tiers"]["HBM"]
        assert (where, said) == (
            home,
            {"outcome": "pinned", "reason": "", "tiers": {"HBM": blocks}, "missing_blocks": 0},
        )
        assert 4 < blocks <= BLOCKS // 4
        await crowd(engines[home], "first")
        await resident(home)
        assert await ask(gateway) == (home, 16 * blocks)
        shown = (await admin.ok("GET", "/prefixes"))["instances"][home]
        assert (shown["pinned_blocks"], shown["limit_blocks"], shown["problem"]) == (blocks, BLOCKS // 4, None)

        ahead = await admin.ok("POST", "/prefixes", ASKED | {"instances": [other]})
        assert ahead["id"] == pin["id"]
        assert ahead["instances"][other]["missing_blocks"] == blocks
        big = ASKED | {"messages": [{"role": "user", "content": 3 * SYSTEM}]}
        status, _, said = await admin.call("POST", "/prefixes", big | {"instances": ["a"]})
        assert (status, said["error"]["code"]) == (409, "pin_refused"), said

        gone = await admin.ok("DELETE", f"/prefixes/{pin['id']}")
        assert {name: each["outcome"] for name, each in gone["instances"].items()} == dict.fromkeys("ab", "unpinned")
        await crowd(engines[home], "second")
        await resident(home)
        assert (await ask(gateway))[1] == 0

        for name in engines:
            await resident(name)
        pin = await admin.ok("POST", "/prefixes", ASKED)
        forgotten = await admin.ok("POST", "/prefixes/invalidate", ASKED)
        assert (forgotten["unpinned"], forgotten["failed"]) == ([pin["id"]], 0)
        dropped = {name: each["dropped"]["HBM"] for name, each in forgotten["instances"].items()}
        assert {name: dropped[name] for name in pin["instances"]} == dict.fromkeys(pin["instances"], blocks)
        assert (await admin.ok("GET", "/prefixes"))["data"] == []
        for name in engines:
            await resident(name)
        assert (await ask(gateway))[1] == 0
