import socket

import pytest

from kvgate.failure import CommandError
from kvgate.ports import free_ports, is_loopback, need_free


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


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(CommandError, match="a port is a number from 1 to 65535"):
        need_free("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(CommandError, match=r"can't listen on 192\.0\.2\.1"):
        need_free("192.0.2.1", free_ports(1)[0])
    with pytest.raises(CommandError, match="is not an address of this machine"):
        need_free("no-such-host.invalid", 8000)


def test_what_counts_as_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.1.2.3", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "example.org"]))  # noqa: S104
