"""Plausibility checks of an instance's ``/kv/v1/stats``: routing relies on them."""

import ipaddress
from urllib.parse import urlsplit

import msgspec

from gateway.loopback import is_loopback
from gateway.registry.addresses import AddressRules
from kvcontrol.core.control import InstanceStats
from kvcontrol.core.errors import IdentityError
from kvcontrol.core.pd import parse_endpoint
from kvcontrol.core.wire import MAX_BLOCK_SIZE_TOKENS, MAX_SEQ

_MAX_PORT = 65_535
_MAX_COUNT = 2**53 - 1
_ANY_HOST = ("*", "0.0.0.0", "::")  # noqa: S104 - compared, not bound


class ReportError(Exception):
    """A report that can be read and can't be true; the message names the field, its value and what is allowed."""


def read_report(body: bytes, *, url: str, rules: AddressRules | None) -> InstanceStats:
    """Return the report of the instance at ``url``; with ``rules`` its event sockets are on its own host or in allowed
    networks.

    Raises one of ``UNREADABLE`` for what is no report at all, ``ReportError`` for one that can't be true.
    """
    try:
        stats = msgspec.json.decode(body, type=InstanceStats)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, IdentityError):
            raise ReportError(f"identity: {error.__cause__}") from error
        raise
    counts = {
        "context_length_tokens": stats.context_length_tokens,
        "load.running": stats.load.running,
        "load.waiting": stats.load.waiting,
        "load.max_batch_size": stats.load.max_batch_size,
        "prefix_cache.query_tokens": stats.prefix_cache.query_tokens,
        "prefix_cache.hit_tokens": stats.prefix_cache.hit_tokens,
        "events.dropped": stats.events.dropped,
        "events.hook_errors": stats.events.hook_errors,
    }
    for tier, held in stats.tiers.items():
        counts |= {
            f"tiers.{tier}.capacity_blocks": held.capacity_blocks,
            f"tiers.{tier}.used_blocks": held.used_blocks,
            f"tiers.{tier}.cached_blocks": held.cached_blocks,
            f"tiers.{tier}.block_bytes": held.block_bytes,
        }
    for name, value in counts.items():
        if not 0 <= value <= _MAX_COUNT:
            raise ReportError(f"{name} is {value}; it is from 0 to {_MAX_COUNT}")
    if not -1 <= stats.events.seq <= MAX_SEQ:
        raise ReportError(f"events.seq is {stats.events.seq}; it is from -1 to {MAX_SEQ}")
    if stats.identity.block_size_tokens > MAX_BLOCK_SIZE_TOKENS:
        raise ReportError(
            f"identity.block_size_tokens is {stats.identity.block_size_tokens}; it is from 1 to {MAX_BLOCK_SIZE_TOKENS}"
        )
    _check_endpoint("events.endpoint", stats.events.endpoint, url, rules=rules)
    _check_endpoint("events.replay_endpoint", stats.events.replay_endpoint, url, rules=rules)
    if stats.pd is not None and stats.pd.endpoint and parse_endpoint(stats.pd.endpoint) is None:
        raise ReportError(f"pd.endpoint is {stats.pd.endpoint!r}; it is host:port, or nothing")
    return stats


def _check_endpoint(name: str, endpoint: str, url: str, *, rules: AddressRules | None) -> None:
    """A socket file is this machine's: only an instance on it may name one. With ``rules`` no instance has the
    gateway connect where it could not have registered itself.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if host and port.isascii() and port.isdigit() and 0 < int(port) <= _MAX_PORT:
            plain = host.strip("[]").lower()
            if rules is not None and plain not in {*_ANY_HOST, urlsplit(url).hostname}:
                try:
                    rules.check(ipaddress.ip_address(plain))
                except ValueError as error:
                    raise ReportError(
                        f"{name} is {endpoint!r}, another host than {url}; it is tcp://*:port ({error})"
                    ) from None
            return
    if scheme == "ipc" and rest.startswith("/") and ".." not in rest.split("/"):
        if is_loopback(urlsplit(url).hostname or ""):
            return
        raise ReportError(f"{name} is {endpoint!r}, a socket of another machine; it is tcp://host:port")
    raise ReportError(f"{name} is {endpoint!r}; it is tcp://host:port")
