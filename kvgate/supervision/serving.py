"""When a gateway and its engines are of use: all processes ready, and every engine usable to the gateway."""

import asyncio

from kvgate.failure import CommandError
from kvgate.supervision.probe import HttpProbe
from kvgate.supervision.supervisor import PROBE_EVERY_S, Supervisor

USABLE_LIMIT_S = 120.0


async def until_all_serve(children: Supervisor, probe: HttpProbe, gateway_url: str, count: int) -> None:
    """Return when all processes are ready and the gateway counts every engine as usable. Raises ``CommandError``."""
    await children.until_ready()
    usable = 0

    async def ask() -> None:
        nonlocal usable
        while usable < count:
            usable = int((await probe.read(f"{gateway_url}/readyz")).get("usable", 0))
            await asyncio.sleep(PROBE_EVERY_S)

    try:
        async with asyncio.timeout(USABLE_LIMIT_S):
            await children.unless_one_ends(ask())
    except TimeoutError:
        raise CommandError(
            f"all processes run, but after {USABLE_LIMIT_S:.0f} s the gateway can use {usable} of {count} engines",
            f"{gateway_url}read {gateway_url}/readyz and the logs of this run",
        ) from None
