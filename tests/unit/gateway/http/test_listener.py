"""A listener that is given up: what waits there is kept, what comes later is not."""

import socket
import threading

import pytest

from gateway.http.listener import refuse_all, take_no_more, waiting


@pytest.fixture
def listener() -> socket.socket:
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    made.listen(16)
    return made


def test_what_waits_is_accepted_before_it_returns_and_nothing_new_comes_in(listener: socket.socket) -> None:
    with listener:
        address = listener.getsockname()
        early = [socket.create_connection(address, timeout=30) for _ in range(3)]
        assert waiting(listener) == 3
        giving_up = threading.Thread(target=take_no_more, args=[listener], kwargs={"limit_s": 60.0})
        giving_up.start()
        assert giving_up.is_alive()
        accepted = [listener.accept()[0] for _ in early]
        giving_up.join(60)
        assert not giving_up.is_alive()
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.2)
        for each, other in zip(early, accepted, strict=True):
            each.sendall(b"still there")
            assert other.recv(16) == b"still there"
            each.close()
            other.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=30)


def test_it_waits_no_longer_than_it_may(listener: socket.socket) -> None:
    with listener, socket.create_connection(listener.getsockname()):
        take_no_more(listener, limit_s=0.05)
        assert waiting(listener) == 1


def test_a_listener_that_is_shut_down_refuses_though_another_process_keeps_it_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, listener.dup() as kept:
        place = kept.getsockname()
        refuse_all(listener)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place)
