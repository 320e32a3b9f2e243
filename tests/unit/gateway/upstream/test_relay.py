"""How a stream ends that its engine ended in its midst, and whose word holds where both say something."""

import asyncio
import json
from collections.abc import Sequence
from time import monotonic
from typing import cast

import pytest

from gateway.deadline import Deadline
from gateway.types import Operation
from gateway.upstream import FailureKind, Relayed, UpstreamFailureError, relay
from gateway.upstream.client import UpstreamResponse
from gateway.upstream.headers import Header

ONE = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
DONE = "[DONE]"


class Answer:
    """An instance's answer in these pieces, to an orderly end."""

    status = 200
    is_event_stream = readable = exhausted = True

    def __init__(self, pieces: Sequence[bytes], headers: Sequence[Header] = ()) -> None:
        self._pieces = list(pieces)
        self.headers = headers

    async def read(self) -> bytes:
        await asyncio.sleep(0)
        return self._pieces.pop(0) if self._pieces else b""

    def expect_end(self) -> None:
        self._pieces.clear()

    def close(self) -> None:
        self._pieces.clear()


class Client:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.headers: list[Header] = []
        self.body = b""

    async def start(self, status: int, headers: Sequence[Header]) -> None:
        assert status == 200
        self.headers = list(headers)

    async def send(self, data: bytes) -> None:
        self.body += data

    async def finish(self, data: bytes = b"") -> None:
        self.body += data

    def events(self) -> list[str]:
        """What a reader of server-sent events is given: events without a blank line behind them are none."""
        *whole, left = self.body.decode().replace("\r\n", "\n").split("\n\n")
        assert left == ""
        return ["\n".join(line[6:] for line in each.split("\n") if line.startswith("data: ")) for each in whole if each]


async def relayed(
    client: Client,
    *pieces: bytes,
    answer: Answer | None = None,
    own: Sequence[Header] = (),
    limit_s: float = 60,
) -> Relayed:
    with (deadline := Deadline(started_s=monotonic(), limit_s=limit_s)):
        return await relay(
            cast("UpstreamResponse", answer or Answer(pieces)),
            client,
            operation=Operation.CHAT,
            own_headers=own,
            hide_usage=False,
            deadline=deadline,
            paused=lambda _: None,
        )


@pytest.mark.parametrize(
    "half", [ONE[:20], ONE[:-3], b"da", b'data: {"error": {"mess', b": a comment", ONE[:20] + b"\n"]
)
async def test_of_half_an_event_nothing_is_left_between_the_client_and_the_error(half: bytes) -> None:
    client = Client()
    assert (await relayed(client, ONE, half)).failure is not None
    first, error, last = client.events()
    assert json.loads(first)["choices"]
    assert json.loads(error)["error"]["code"] == "upstream_cut"
    assert last == DONE


@pytest.mark.parametrize("missing", [1, 2])
async def test_a_last_event_that_lacks_its_blank_line_only_is_given_it(missing: int) -> None:
    client = Client()
    await relayed(client, ONE[:-missing])
    first, error, last = client.events()
    assert json.loads(first)["choices"]
    assert "error" in json.loads(error)
    assert last == DONE


async def test_an_engines_own_error_without_its_blank_line_is_one_event_and_done_another() -> None:
    client = Client()
    assert (await relayed(client, ONE, b'data: {"error": {"message": "no"}}')).failure == "error_event"
    assert [json.loads(each) for each in client.events()[1:-1]] == [{"error": {"message": "no"}}]
    assert client.events()[-1] == DONE


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", ""])
async def test_an_engines_own_error_in_another_shape_is_rewrapped(end: str) -> None:
    """LMDeploy's says the status for a code."""
    own = {"object": "error", "message": "the engine died", "type": "server_error", "code": 503, "param": None}
    client = Client()
    said = f"data: {json.dumps({'error': own})}{end}".encode()
    assert (await relayed(client, ONE, said)).failure == "error_event"
    _, error, last = client.events()
    assert json.loads(error) == {
        "error": {
            "message": "the engine died",
            "type": "server_error",
            "param": None,
            "code": "engine_unavailable",
        }
    }
    assert last == DONE


async def test_an_event_that_was_let_pass_for_its_length_is_kept_apart_from_the_error() -> None:
    client = Client()
    await relayed(client, b"data: " + b"x" * (5 << 20), b"x" * 100)
    _, error, last = client.events()
    assert json.loads(error)["error"]["code"] == "upstream_cut"
    assert last == DONE


async def test_what_the_gateway_says_of_a_quota_is_said_once() -> None:
    client, limit = Client(), b"x-ratelimit-limit-requests"
    answer = Answer([ONE, b"data: [DONE]\n\n"], [(limit, b"1"), (b"x-other", b"2")])
    await relayed(client, answer=answer, own=[(limit, b"7")])
    assert [value for name, value in client.headers if name == limit] == [b"7"]
    assert (b"x-other", b"2") in client.headers


class BreakingOff(Answer):
    """Its connection ends behind its last piece, which is no orderly end."""

    exhausted = False

    async def read(self) -> bytes:
        if not self._pieces:
            raise UpstreamFailureError(FailureKind.CUT, "the engine's connection ended within its answer")
        return await super().read()


async def test_an_engine_that_says_why_it_goes_and_breaks_off_is_not_contradicted() -> None:
    client = Client()
    own = b'data: {"error": {"message": "out of memory"}}\n\n'
    ended = await relayed(client, answer=BreakingOff([ONE, own]))
    assert ended.failure == "cut"
    assert [json.loads(each) for each in client.events()[1:-1]] == [{"error": {"message": "out of memory"}}]
    assert client.events()[-1] == DONE


class SlowReader(Client):
    """Takes nothing for a while, once the end of the answer comes."""

    async def send(self, data: bytes) -> None:
        if DONE.encode() in data:
            await asyncio.sleep(0.3)
        await super().send(data)


async def test_a_stream_whose_end_is_not_taken_before_its_time_is_over_has_no_clean_end() -> None:
    client = SlowReader()
    ended = await relayed(client, ONE, f"data: {DONE}\n\n".encode(), limit_s=0.1)
    assert ended.failure == "deadline"
    _, error, last = client.events()
    assert "error" in json.loads(error)
    assert last == DONE
