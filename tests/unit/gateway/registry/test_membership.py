import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.registry import InstanceSpec, InstanceState, LoadTracker, Membership, ProbeResult, Registry, Source
from gateway.registry.checks import CheckRules
from gateway.registry.membership import Loops
from kvcontrol.core import InstanceId
from tests.support.running_gateway import eventually

A, B = InstanceId("a"), InstanceId("b")


def spec(name: str, port: int = 1, source: Source = Source.ADMIN) -> InstanceSpec:
    return InstanceSpec(id=InstanceId(name), url=f"http://127.0.0.1:{port}", source=source)


class Fleet:
    """A membership whose loops only say that they run."""

    def __init__(self) -> None:
        self.registry = Registry((spec("a", 1),), rules=CheckRules(unhealthy_after=1))
        self.load = LoadTracker()
        self.running: set[InstanceId] = set()
        self.told: list[tuple[str, InstanceId]] = []
        self.members = Membership(
            registry=self.registry, load=self.load, loops_of=self.loops_of, on_failure=print, witnesses=(self,)
        )

    def loops_of(self, instance: InstanceId) -> Loops:
        async def run() -> None:
            self.running.add(instance)
            try:
                await asyncio.Event().wait()
            finally:
                self.running.discard(instance)

        return {f"loop:{instance}": run}

    def joined(self, instance: InstanceId) -> None:
        self.told.append(("joined", instance))

    def left(self, instance: InstanceId) -> None:
        self.told.append(("left", instance))

    def names(self) -> list[str]:
        return [each.id for each in self.registry.all()]

    def healthy(self, instance: InstanceId) -> None:
        self.registry.checks.succeeded(instance, ProbeResult(models=(), stats=None, stats_problem=None, in_flight=0))


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    async with fleet.members:
        await asyncio.sleep(0)
        yield fleet
    assert not fleet.running


async def test_who_joins_is_attended_and_who_leaves_no_longer(fleet: Fleet) -> None:
    fleet.members.add(spec("b", 2))
    await asyncio.sleep(0)
    assert fleet.running == {A, B}
    await fleet.members.retire(B, drain_s=5)
    assert (fleet.running, fleet.names()) == ({A}, ["a"])
    assert fleet.told == [("joined", A), ("joined", B), ("left", B)]


async def test_an_id_or_an_address_is_taken_once(fleet: Fleet) -> None:
    with pytest.raises(ValueError, match="instance id 'a' is taken"):
        fleet.members.add(spec("a", 2))
    with pytest.raises(ValueError, match="is the address of instance 'a'"):
        fleet.members.add(spec("b", 1))


async def test_an_instance_leaves_only_when_what_it_has_is_done_and_gets_nothing_new_before(fleet: Fleet) -> None:
    fleet.healthy(A)
    with fleet.load.placed(A, uncached_tokens=1, cold=True):
        leaving = fleet.members.retire(A, drain_s=60)
        await asyncio.sleep(0.01)
        assert fleet.registry.available.usable() == ()
        assert fleet.names() == ["a"]
        assert fleet.registry.get(A).state is InstanceState.HEALTHY
    await leaving
    assert fleet.names() == []
    assert fleet.load.of(A).in_flight == 0


async def test_one_that_takes_too_long_is_forgotten_all_the_same(fleet: Fleet) -> None:
    with fleet.load.placed(A, uncached_tokens=1, cold=True):
        await fleet.members.retire(A, drain_s=0.01)
        assert fleet.names() == []
    assert fleet.load.of(A).in_flight == 0


async def test_one_that_is_named_again_while_it_leaves_stays(fleet: Fleet) -> None:
    with fleet.load.placed(A, uncached_tokens=1, cold=True):
        fleet.members.retire(A, drain_s=60)
        assert fleet.members.leaving(A)
        fleet.members.add(spec("a", 1))
        assert not fleet.members.leaving(A)
        assert fleet.told == [("joined", A), ("joined", A)]
    await asyncio.sleep(0.01)
    assert (fleet.names(), fleet.running) == (["a"], {A})
    fleet.healthy(A)
    assert len(fleet.registry.available.usable()) == 1


async def test_draining_and_resuming_keep_a_member(fleet: Fleet) -> None:
    fleet.healthy(A)
    assert fleet.members.drain(A).draining
    assert fleet.registry.available.usable() == ()
    assert not fleet.members.resume(A).draining
    assert len(fleet.registry.available.usable()) == 1
    with pytest.raises(KeyError):
        fleet.members.drain(B)


async def test_a_source_owns_what_it_named_and_nothing_else(fleet: Fleet) -> None:
    def seen(*specs: InstanceSpec) -> None:
        fleet.members.reconcile(Source.DNS, specs, drain_s=1)

    seen(spec("x", 10, Source.DNS), spec("y", 11, Source.DNS), spec("a", 12, Source.DNS))
    assert fleet.names() == ["a", "x", "y"]
    assert fleet.registry.get(A).url.endswith(":1")
    seen(spec("y", 11, Source.DNS))
    await eventually(lambda: fleet.names() == ["a", "y"])
    seen(spec("y", 13, Source.DNS))
    await eventually(lambda: fleet.registry.get(InstanceId("y")).url.endswith(":13"))
    seen()
    await eventually(lambda: fleet.names() == ["a"])


async def test_an_address_or_a_name_that_a_leaving_instance_still_has_is_taken_over_from_it(fleet: Fleet) -> None:
    def seen(*specs: InstanceSpec) -> None:
        fleet.members.reconcile(Source.KUBERNETES, specs, drain_s=60)

    pod = InstanceId("pod-0")
    seen(spec("pod-0", 20, Source.KUBERNETES))
    with fleet.load.placed(pod, uncached_tokens=1, cold=True):
        seen(spec("pod-0", 21, Source.KUBERNETES), spec("pod-1", 20, Source.KUBERNETES))
        await asyncio.sleep(0.01)
        assert fleet.registry.get(pod).url.endswith(":20")
        assert fleet.registry.get(pod).draining
        assert fleet.names() == ["a", "pod-0"]
    there = {"a": ":1", "pod-0": "21", "pod-1": "20"}
    await eventually(lambda: {each.id: each.url[-2:] for each in fleet.registry.all()} == there)
    assert not fleet.registry.get(pod).draining


async def test_who_waits_for_a_leaving_instance_and_is_no_longer_named_does_not_come(fleet: Fleet) -> None:
    pod = InstanceId("pod-0")
    fleet.members.reconcile(Source.KUBERNETES, [spec("pod-0", 20, Source.KUBERNETES)], drain_s=60)
    with fleet.load.placed(pod, uncached_tokens=1, cold=True):
        fleet.members.reconcile(Source.KUBERNETES, [spec("pod-0", 21, Source.KUBERNETES)], drain_s=60)
        fleet.members.reconcile(Source.KUBERNETES, [], drain_s=60)
    await eventually(lambda: fleet.names() == ["a"])
