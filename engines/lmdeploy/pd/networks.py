"""Networks in the operator's list of peers: their hosts may exchange KV blocks with this instance."""

import ipaddress

LOOPBACK = "127.0.0.0/8,::1/128"

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_networks(text: str) -> tuple[Network, ...]:
    """Read networks with commas between them; raises ``ValueError`` naming the one that is none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"no network is listed; {LOOPBACK} are those of one host")
    return tuple(ipaddress.ip_network(name) for name in names)
