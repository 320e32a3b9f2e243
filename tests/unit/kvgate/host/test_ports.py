import asyncio
import socket
import sys

import pytest
import zmq

from kvgate.failure import CommandError
from kvgate.host.ports import PORT_RANGE_VARIABLE, _quiet_ports, free_ports, need_free, reserved_ports


def test_a_port_in_use_is_named_with_its_holder_and_a_way_out() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(CommandError, match=rf"port {port} on 127\.0\.0\.1 is in use by .+ \(pid \d+\)") as failure:
            need_free("127.0.0.1", port)
        assert "--port" in failure.value.advice


def test_free_ports_are_distinct_and_free() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    need_free("127.0.0.1", ports[0])


def test_free_ports_are_none_that_the_kernel_gives_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PORT_RANGE_VARIABLE, raising=False)
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        assert any_port.getsockname()[1] not in _quiet_ports()
    assert all(port in _quiet_ports() for port in free_ports(10))


def test_ports_come_from_the_range_that_is_given_and_are_none_that_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_ports(1)[0]
    while first > 65532:
        first = free_ports(1)[0]
    monkeypatch.setenv(PORT_RANGE_VARIABLE, f"{first}-{first + 3}")
    others = {first + 1, first + 2, first + 3}
    assert free_ports(1, besides=others) == [first]
    with reserved_ports(1, besides=others) as ports:
        assert ports == [first]
        with pytest.raises(CommandError, match=f"no free port from {first} to {first + 3}"):
            free_ports(1, besides=others)


@pytest.mark.parametrize(
    "text", ["20000", "20000-", "-20000", "20000-19999", "80-90", "65000-65536", "a-b", "1-2-3", "²-³"]
)
def test_a_range_of_ports_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT_RANGE_VARIABLE, text)
    with pytest.raises(CommandError, match=r"KVGATE_PORT_RANGE is .*two ports from 1024 to 65535"):
        free_ports(1)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere two sockets can't share a port")
async def test_a_reserved_port_is_for_servers_and_for_nobody_else() -> None:
    with reserved_ports(3) as ports:
        assert len(set(ports)) == 3
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", ports[0]))
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", ports[0])
        async with server:
            reader, writer = await asyncio.open_connection("127.0.0.1", ports[0])
            assert await reader.read() == b""
            writer.close()
        with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
            publisher.bind(f"tcp://127.0.0.1:{ports[1]}")
    need_free("127.0.0.1", ports[2])


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(CommandError, match="ports are numbers from 1 to 65535"):
        need_free("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(CommandError, match=r"cannot listen on 192\.0\.2\.1"):
        need_free("192.0.2.1", free_ports(1)[0])
    with pytest.raises(CommandError, match="is not an address of this machine"):
        need_free("no-such-host.invalid", 8000)
