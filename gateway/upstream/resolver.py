"""Names of registered instances are looked up under the rules, for each new connection."""

import ipaddress
from collections.abc import Callable, Sequence

from gateway.http.resolver import Address, Resolver, SystemResolver
from gateway.registry.addresses import AddressError, AddressRules


class GuardedResolver:
    """Leaves out addresses that the rules refuse. ``trusted`` says of a host that the settings name it themselves."""

    def __init__(self, rules: AddressRules, *, trusted: Callable[[str], bool], lookup: Resolver | None = None) -> None:
        self._rules = rules
        self._trusted = trusted
        self._lookup = lookup or SystemResolver()

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        """Return the host's allowed addresses; raises ``OSError`` when it has none."""
        found = await self._lookup.resolve(host, port)
        if self._trusted(host):
            return found
        allowed = []
        refusal: AddressError | None = None
        for each in found:
            try:
                self._rules.check(ipaddress.ip_address(each.host.partition("%")[0]))
            except AddressError as error:
                refusal = error
            else:
                allowed.append(each)
        if not allowed:
            raise OSError(None, str(refusal or f"{host} has no address"))
        return allowed
