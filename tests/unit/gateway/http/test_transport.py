"""What stands between uvicorn's request cycle and a client's connection."""

import asyncio
from typing import Any

from gateway.http.transport import ClientTransport

LINGER_S = 0.01


class Wire:
    """An event loop's transport whose client takes ``taken`` bytes each time somebody looks."""

    def __init__(self, unsent: int = 0, taken: int = 0) -> None:
        self.calls: list[bytes] = []
        self.unsent = unsent
        self.taken = taken
        self.looks = 0
        self.closed = False
        self.aborted = asyncio.Event()

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.calls.append(data)

    def writelines(self, pieces: list[bytes]) -> None:
        self.write(b"".join(pieces))

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True
        self.aborted.set()

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        self.looks += 1
        self.unsent = max(0, self.unsent - self.taken)
        return self.unsent

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        del name
        return default

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def transport(unsent: int = 0, taken: int = 0) -> tuple[ClientTransport, Wire]:
    wire = Wire(unsent, taken)
    return ClientTransport(wire, loop=asyncio.get_running_loop(), linger_s=LINGER_S), wire


async def test_what_is_held_is_written_in_one_piece_and_in_order() -> None:
    held, wire = transport()
    held.write(b"first;")
    held.hold()
    held.write(b"head;")
    held.write(b"body;")
    assert wire.calls == [b"first;"]
    held.release()
    held.release()
    held.write(b"last")
    assert wire.calls == [b"first;", b"head;body;", b"last"]


async def test_closing_writes_what_is_held_before() -> None:
    held, wire = transport()
    held.hold()
    held.write(b"head")
    held.close()
    assert (wire.calls, wire.closed, held.is_closing()) == ([b"head"], True, True)


async def test_holding_twice_loses_nothing() -> None:
    held, wire = transport()
    held.hold()
    held.write(b"a")
    held.hold()
    held.write(b"b")
    held.release()
    assert wire.calls == [b"ab"]


async def test_a_client_that_takes_nothing_is_cut_off_after_the_close() -> None:
    closing, wire = transport(unsent=100)
    closing.close()
    assert not wire.aborted.is_set()
    async with asyncio.timeout(20):
        await wire.aborted.wait()


async def test_a_client_that_takes_some_is_waited_for() -> None:
    closing, wire = transport(unsent=100, taken=10)
    closing.close()
    async with asyncio.timeout(20):
        await wire.aborted.wait()
    assert wire.looks > 10, "it took ten looks to take all, and nothing more came then"


async def test_a_connection_that_is_lost_is_not_looked_after_any_more() -> None:
    closing, wire = transport(unsent=100)
    closing.close()
    closing.lost()
    await asyncio.sleep(5 * LINGER_S)
    assert not wire.aborted.is_set()


async def test_an_abort_writes_nothing_of_what_is_held() -> None:
    aborted, wire = transport()
    aborted.hold()
    aborted.write(b"head")
    aborted.abort()
    aborted.release()
    assert (wire.calls, wire.aborted.is_set()) == ([], True)
