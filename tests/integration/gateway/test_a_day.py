"""More than a day of three gateways whose clocks are wrong, on a real store: keys and pins end, audit entries and
idempotency keys are forgotten, and operations are taken over, all by the store's clock. The test holds the clocks.
"""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gateway.admission import Authenticator, Directory, DirectoryKeeper
from gateway.errors import AuthenticationError, NoInstanceError
from gateway.fleet.pin_expiry import PinExpiry
from gateway.problems import ProblemKind, Problems
from gateway.state import ABSENT, Action, AuditBound, Delete, Kind, Put, Remembered, Store, open_sqlite
from gateway.state.bodies import KeyBody
from gateway.state.fleet_bodies import PinBody
from gateway.state.postgres import open_postgres
from gateway.state.shared_clock import SharedClock
from gateway.state.stored import patched, written
from tests.support.databases import postgres
from tests.support.held_clock import DAY_S, HeldClock, PostgresClock, WrongClock

STEP_S = 600.0
STEPS = 160
AUDIT_S = 6 * 3600.0
REMEMBERED_S = DAY_S
LEASE_S = 5.0
TRUST_S = 3600.0
SECRET = b"the same secret everywhere"


class Gateway:
    """What of a gateway goes by clocks: its own is wrong, and may be set while it runs."""

    def __init__(self, store: Store, right: HeldClock, ahead_s: float) -> None:
        self.store = store
        self.own = WrongClock(right, ahead_s)
        self.clock = SharedClock(self.own, right.ticks)
        self.problems = Problems()
        self.authenticator = Authenticator([], salt_secret=SECRET, require_keys=True, clock=self.clock)
        self.keeper = DirectoryKeeper(
            store,
            publish=self._publish,
            expire=self.authenticator.distrust,
            trust_s=TRUST_S,
            clock=self.clock,
            problems=self.problems,
        )
        self.expiry = PinExpiry(store, self.keeper.refresh)

    def _publish(self, directory: Directory) -> None:
        self.authenticator.publish(directory)

    def accepts(self, key: str) -> bool:
        try:
            self.authenticator.authenticate([key.encode()])
        except (AuthenticationError, NoInstanceError):
            return False
        return True

    async def look(self) -> None:
        """Do what its loops do: read the store, and end pins whose time is over."""
        await self.keeper.refresh()
        now_s = self.clock()
        over = [name for name, each in self.keeper.current.pins.items() if (each.expires_at_s or now_s + 1) <= now_s]
        if over:
            await self.expiry(over)


@dataclass(slots=True)
class Truth:
    """What must be, by the right time."""

    keys: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By their names: keys that are not revoked, and when they end."""
    gone: set[str] = field(default_factory=set)
    pins: dict[str, float] = field(default_factory=dict)
    audit: list[tuple[str, float]] = field(default_factory=list)
    answered: dict[str, float] = field(default_factory=dict)


class Day:
    """Makes changes at random gateways, and compares what each shows with what is true."""

    def __init__(self, right: HeldClock, gateways: list[Gateway], dice: random.Random) -> None:
        self._right = right
        self._gateways = gateways
        self._dice = dice
        self._number = 0
        self.truth = Truth()

    async def change(self) -> None:
        gateway = self._dice.choice(self._gateways)
        what = self._dice.choice((self._make_key, self._make_key, self._revoke, self._pin, self._answer))
        await what(gateway)

    async def _apply(self, gateway: Gateway, change: Put | Delete, verb: str, **more: Any) -> None:
        target = f"{verb} {self._number}"
        await gateway.store.apply([change], action=Action(actor="admin", action=verb, target=target), **more)
        self.truth.audit.append((target, self._right()))

    async def _make_key(self, gateway: Gateway) -> None:
        self._number += 1
        name, key, lasts_s = f"{self._number:012x}", f"key {self._number}", self._dice.uniform(300, DAY_S)
        body = KeyBody(
            tenant="acme",
            digest=gateway.authenticator.digest(key),
            expires_at_s=gateway.clock() + lasts_s,
        )
        await self._apply(gateway, Put(kind=Kind.KEY, name=name, body=written(body), expected=ABSENT), "create")
        self.truth.keys[name] = (key, self._right() + lasts_s)

    async def _revoke(self, gateway: Gateway) -> None:
        if not self.truth.keys:
            return
        self._number += 1
        name = self._dice.choice(sorted(self.truth.keys))
        present = await gateway.store.document(Kind.KEY, name)
        assert present is not None
        body = patched(present, revoked_at_s=gateway.clock())
        await self._apply(gateway, Put(kind=Kind.KEY, name=name, body=body, expected=present.version), "revoke")
        self.truth.gone.add(self.truth.keys.pop(name)[0])

    async def _pin(self, gateway: Gateway) -> None:
        self._number += 1
        name, lasts_s = f"pin-{self._number}", self._dice.uniform(60, 4 * 3600)
        body = PinBody(
            model="m", tenant="acme", tokens=16, chains={}, instances=(), expires_at_s=gateway.clock() + lasts_s
        )
        await self._apply(gateway, Put(kind=Kind.PIN, name=name, body=written(body), expected=ABSENT), "pin")
        self.truth.pins[name] = self._right() + lasts_s

    async def _answer(self, gateway: Gateway) -> None:
        self._number += 1
        said = Remembered(key=f"once-{self._number}", request="r", status=200, body="{}")
        change = Put(kind=Kind.TENANT, name="acme", body=json.dumps({"note": str(self._number)}))
        await self._apply(gateway, change, "put", remember=lambda _: said)
        self.truth.answered[said.key] = self._right()

    async def check(self) -> None:
        truth, now_s = self.truth, self._right()
        truth.pins = {name: until_s for name, until_s in truth.pins.items() if until_s > now_s}
        for gateway in self._gateways:
            assert gateway.clock() == pytest.approx(now_s, abs=0.01)
            assert {key for key, _ in truth.keys.values() if gateway.accepts(key)} == {
                key for key, until_s in truth.keys.values() if until_s > now_s
            }
            assert not any(map(gateway.accepts, truth.gone))
            assert gateway.keeper.current.pins.keys() == truth.pins.keys()
        [gateway] = self._dice.sample(self._gateways, 1)
        shown = {each.action.target for each in await gateway.store.audit(limit=10_000)}
        kept = {target for target, at_s in truth.audit if at_s >= now_s - AUDIT_S}
        assert {each for each in shown if not each.startswith("prefixes/")} == kept
        for key, at_s in truth.answered.items():
            remembered = await gateway.store.remembered(key)
            assert (remembered is not None) == (at_s >= now_s - REMEMBERED_S), key


@contextmanager
def stores(kind: str, folder: Path, right: HeldClock) -> Iterator[tuple[Callable[[], Store], Callable[[], None]]]:
    """Give what opens a store, and what sets its clock to the right time."""
    bound = AuditBound(entries=100_000, age_s=AUDIT_S)
    if kind == "sqlite":
        yield lambda: open_sqlite(folder, bound, clock=right), lambda: None
        return
    with ExitStack() as stack:
        url = stack.enter_context(postgres())
        clock = PostgresClock(url)
        stack.callback(clock.close)
        clock.set(right())
        yield lambda: open_postgres(url, bound), lambda: clock.set(right())


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_over_a_day_all_that_ends_by_time_ends_by_the_stores_clock_at_every_gateway(
    tmp_path: Path, kind: str
) -> None:
    right, dice = HeldClock(), random.Random(1)  # noqa: S311
    with stores(kind, tmp_path, right) as (opened, tick):
        gateways = [Gateway(opened(), right, ahead_s) for ahead_s in (0.0, 400 * DAY_S, -400 * DAY_S)]
        day = Day(right, gateways, dice)
        try:
            for step in range(STEPS):
                for gateway in gateways:
                    await gateway.look()
                for _ in range(dice.randrange(4)):
                    await day.change()
                for gateway in gateways:
                    await gateway.look()
                await day.check()
                if step % 20 == 10:  # somebody sets a machine's clock; nothing is asked of the store in between
                    dice.choice(gateways).own.ahead_s += dice.uniform(-DAY_S, DAY_S)
                    await day.check()
                right.now_s += STEP_S
                tick()
            assert min(map(len, (day.truth.keys, day.truth.gone, day.truth.answered))) > 20
            assert right.ticks() > REMEMBERED_S
            assert [bool(each.problems.counts()[ProblemKind.CLOCK]) for each in gateways[1:]] == [True, True]
        finally:
            for gateway in gateways:
                await gateway.store.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_an_operation_is_taken_over_when_its_lease_ends_by_the_stores_clock(tmp_path: Path, kind: str) -> None:
    right = HeldClock()
    with stores(kind, tmp_path, right) as (opened, tick):
        ahead, behind = (Gateway(opened(), right, days * DAY_S) for days in (400, -400))
        try:
            completes = Action(actor="admin", action="swap", target="t", outcome="begun")
            number = await ahead.store.begin(completes, lease_s=LEASE_S)
            for _ in range(200):  # as long as its gateway is there nobody takes it
                right.now_s += LEASE_S - 1
                tick()
                assert not await behind.store.take(number, lease_s=LEASE_S)
                await ahead.store.hold([number], lease_s=LEASE_S)
            right.now_s += LEASE_S + 1
            tick()
            [operation] = (await behind.store.pending()).operations
            assert operation.left_s == pytest.approx(-1.0, abs=0.01)
            assert await behind.store.take(number, lease_s=LEASE_S)
            assert not await ahead.store.take(number, lease_s=LEASE_S)
        finally:
            await ahead.store.close()
            await behind.store.close()
