import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import dns.asyncresolver
import dns.resolver
import pytest

from gateway.registry import InstanceSpec
from gateway.registry.discovery import DiscoveryError, DnsQuery, DnsWatcher
from tests.support.dns_server import Zone, dns_server


def watching(zone: Zone, *queries: DnsQuery) -> AsyncGenerator[Sequence[InstanceSpec], None]:
    return DnsWatcher(queries, interval_s=0.1, servers=(zone.address,)).watch()


def urls(specs: Sequence[InstanceSpec]) -> list[str]:
    return [each.url for each in specs]


async def test_every_address_of_a_name_is_an_instance_and_changes_are_seen() -> None:
    with dns_server("pool.test. 0 A 10.0.0.1", "pool.test. 0 A 10.0.0.2", "pool.test. 0 AAAA fd00::7") as zone:
        async with aclosing(watching(zone, DnsQuery(name="pool.test", port=9001))) as seen:
            first = await anext(seen)
            assert urls(first) == ["http://10.0.0.1:9001", "http://10.0.0.2:9001", "http://[fd00::7]:9001"]
            assert [each.id for each in first] == ["10.0.0.1-9001", "10.0.0.2-9001", "fd00..7-9001"]
            zone.lines = ["pool.test. 0 A 10.0.0.2"]
            assert urls(await anext(seen)) == ["http://10.0.0.2:9001"]
            zone.lines = []
            assert await anext(seen) == []


async def test_srv_records_name_host_and_port() -> None:
    with dns_server(
        "_http._tcp.pool.test. 0 SRV 1 1 9001 one.test.", "_http._tcp.pool.test. 0 SRV 1 1 9002 two.test."
    ) as zone:
        query = DnsQuery(name="_http._tcp.pool.test", record="SRV", scheme="https")
        async with aclosing(watching(zone, query)) as seen:
            assert urls(await anext(seen)) == ["https://one.test:9001", "https://two.test:9002"]


async def test_a_server_that_fails_is_an_error_and_names_nobody() -> None:
    with dns_server("pool.test. 0 A 10.0.0.1") as zone:
        zone.broken = True
        with pytest.raises(DiscoveryError, match=r"pool\.test A can't be resolved"):
            await anext(watching(zone, DnsQuery(name="pool.test", port=9001)))


async def test_several_names_are_one_set() -> None:
    with dns_server("a.test. 0 A 10.0.0.1", "b.test. 0 A 10.0.0.2", "b.test. 0 A 10.0.0.1") as zone:
        queries = (DnsQuery(name="a.test", port=1), DnsQuery(name="b.test", port=1))
        async with aclosing(watching(zone, *queries)) as seen:
            assert urls(await anext(seen)) == ["http://10.0.0.1:1", "http://10.0.0.2:1"]


async def test_a_cancellation_that_the_resolver_swallows_ends_the_watch_all_the_same() -> None:
    asked = asyncio.Event()

    class Swallowing(dns.asyncresolver.Resolver):
        """As ``asyncio.wait_for`` does on Python 3.11 when its result comes in the moment of the cancellation."""

        async def resolve(self, *_: object, **__: object) -> Any:
            asked.set()
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                raise dns.resolver.NXDOMAIN from None

    watcher = DnsWatcher([DnsQuery(name="pool.test", record="SRV")], interval_s=0.1, servers=["127.0.0.1"])
    answer = asyncio.ensure_future(watcher._answer(Swallowing(configure=False), "pool.test", "SRV"))
    await asked.wait()
    answer.cancel()
    await asyncio.wait([answer])
    assert answer.cancelled()
