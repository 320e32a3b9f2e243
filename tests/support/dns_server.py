"""A real DNS server on loopback, of another library than the one that asks it."""

from collections.abc import Iterator
from contextlib import contextmanager

from dnslib import QTYPE, RCODE, RR
from dnslib.server import BaseResolver, DNSHandler, DNSRecord, DNSServer


class _Silent:
    """The server's log goes nowhere."""

    def __getattr__(self, name: str) -> object:
        def nothing(*_: object) -> None:
            return None

        return nothing


class Zone(BaseResolver):  # type: ignore[misc]  # dnslib is untyped
    """Records as a zone file's lines; ``broken`` answers SERVFAIL."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.broken = False
        self.asked = 0
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def resolve(self, request: DNSRecord, handler: DNSHandler) -> DNSRecord:
        del handler
        self.asked += 1
        reply = request.reply()
        if self.broken:
            reply.header.rcode = RCODE.SERVFAIL
            return reply
        records = RR.fromZone("\n".join(self.lines)) if self.lines else []
        named = [each for each in records if each.rname == request.q.qname]
        if not named:
            reply.header.rcode = RCODE.NXDOMAIN
        for each in named:
            if QTYPE[each.rtype] == QTYPE[request.q.qtype]:
                reply.add_answer(each)
        return reply


@contextmanager
def dns_server(*lines: str) -> Iterator[Zone]:
    zone = Zone()
    zone.lines = list(lines)
    server = DNSServer(zone, address="127.0.0.1", port=0, logger=_Silent())
    zone.port = server.server.server_address[1]
    server.start_thread()
    try:
        yield zone
    finally:
        server.stop()
        server.server.server_close()
        server.thread.join(5)


__all__ = ["Zone", "dns_server"]
