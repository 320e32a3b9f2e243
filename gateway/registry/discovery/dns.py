"""Names in DNS: one instance for each address (A and AAAA), or for each SRV record with its own port.

A headless service of Kubernetes, a Consul name, or a plain round-robin name. Asked for again every ``interval_s``, and
not later than the answer's time to live says. A name that doesn't exist (any more) has no instances; a server that
doesn't answer, or says that it failed, changes nothing.
"""

import asyncio
import ipaddress
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal
from urllib.parse import urlsplit

import dns.asyncresolver
import dns.exception
import dns.nameserver
import dns.rdatatype
import dns.resolver

from gateway.registry.discovery.base import DiscoveryError, instance_name
from gateway.registry.instance import InstanceSpec, Source
from kvcontrol.core.ids import InstanceId

_LEAST_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsQuery:
    """What to ask for. ``port`` is the instances' port, needed for ``A`` and ignored for ``SRV``."""

    name: str
    record: Literal["A", "SRV"] = "A"
    port: int = 0
    scheme: str = "http"


class DnsWatcher:
    """Several names, one set of instances. ``servers`` (``host`` or ``host:port``) instead of the system's own."""

    source: ClassVar[Source] = Source.DNS

    def __init__(
        self, queries: Sequence[DnsQuery], *, interval_s: float, timeout_s: float = 5.0, servers: Sequence[str] = ()
    ) -> None:
        self._queries = tuple(queries)
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._servers = tuple(servers)

    @property
    def place(self) -> str:
        return "DNS " + ", ".join(f"{each.record} {each.name}" for each in self._queries)

    async def watch(self) -> AsyncGenerator[Sequence[InstanceSpec], None]:
        resolver = self._resolver()
        seen: Sequence[InstanceSpec] | None = None
        while True:
            specs: dict[str, InstanceSpec] = {}
            wait_s = self._interval_s
            for query in self._queries:
                found, ttl_s = await self._ask(resolver, query)
                specs |= {each.url: each for each in found}
                wait_s = min(wait_s, ttl_s)
            now = sorted(specs.values(), key=lambda each: each.id)
            if now != seen:
                seen = now
                yield now
            await asyncio.sleep(max(wait_s, _LEAST_INTERVAL_S, self._interval_s / 4))

    def _resolver(self) -> dns.asyncresolver.Resolver:
        try:
            resolver = dns.asyncresolver.Resolver(configure=not self._servers)
        except dns.exception.DNSException as error:
            raise DiscoveryError(f"{self.place}: this system has no DNS servers set up: {error}") from None
        if self._servers:
            parsed = [urlsplit(f"dns://{each}") for each in self._servers]
            resolver.nameservers = [
                dns.nameserver.Do53Nameserver(str(each.hostname), each.port or 53) for each in parsed
            ]
        resolver.lifetime = self._timeout_s
        resolver.timeout = self._timeout_s
        return resolver

    async def _ask(self, resolver: dns.asyncresolver.Resolver, query: DnsQuery) -> tuple[Sequence[InstanceSpec], float]:
        if query.record == "SRV":
            answer = await self._answer(resolver, query.name, "SRV")
            if answer is None:
                return (), self._interval_s
            targets = [(each.target.to_text(omit_final_dot=True), each.port) for each in answer]
            ttl_s = float(answer.ttl)
        else:
            targets, ttl_s = [], self._interval_s
            for kind in ("A", "AAAA"):
                answer = await self._answer(resolver, query.name, kind)
                if answer is not None:
                    targets += [(each.address, query.port) for each in answer]
                    ttl_s = min(ttl_s, float(answer.ttl))
        return [self._spec(query, host, port) for host, port in targets], ttl_s

    async def _answer(self, resolver: dns.asyncresolver.Resolver, name: str, kind: str) -> "dns.resolver.Answer | None":
        try:
            answer = await resolver.resolve(name, kind, search=not name.endswith("."))
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return None
        except (dns.exception.DNSException, OSError) as error:
            raise DiscoveryError(f"{self.place}: {name} {kind} can't be resolved: {error}") from None
        finally:
            _check_cancellation()
        return answer

    def _spec(self, query: DnsQuery, host: str, port: int) -> InstanceSpec:
        shown = host
        try:
            if ipaddress.ip_address(host).version == 6:  # noqa: PLR2004 - IP version
                shown = f"[{host}]"
        except ValueError:
            pass  # a name
        return InstanceSpec(
            id=InstanceId(instance_name(host.replace(":", "."), port)),
            url=f"{query.scheme}://{shown}:{port}",
            source=self.source,
        )


def _check_cancellation() -> None:
    """Raise a cancellation that the resolver has swallowed: on Python 3.11 ``asyncio.wait_for`` does when its result
    comes in the same moment.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
