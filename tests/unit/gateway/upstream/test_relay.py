"""How a stream ends that its engine ended in its midst, and whose word holds where both say something."""

import asyncio
import json
from collections.abc import Sequence
from time import monotonic
from typing import cast

import pytest

from gateway.http.deadline import Deadline
from gateway.http.headers import Header
from gateway.types import Operation
from gateway.upstream import FailureKind, Relayed, UpstreamFailureError, relay
from gateway.upstream.client import UpstreamResponse
from gateway.upstream.relay import AnswerShape

ONE = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
DONE = "[DONE]"
EVENTS: Header = (b"content-type", b"text/event-stream")
CHAT = AnswerShape(Operation.CHAT, stream=True)


class Answer:
    """An instance's answer in these pieces, to an orderly end."""

    readable = True

    def __init__(
        self, pieces: Sequence[bytes], headers: Sequence[Header] = (EVENTS,), *, status: int = 200, lost: bool = False
    ) -> None:
        self._pieces = list(pieces)
        self._lost = lost
        self.headers = headers
        self.status = status
        self.is_event_stream = EVENTS in headers

    @property
    def exhausted(self) -> bool:
        return not self._pieces and not self._lost

    async def read(self) -> bytes:
        await asyncio.sleep(0)
        if not self._pieces and self._lost:
            raise UpstreamFailureError(FailureKind.CUT, "the engine's connection ended within its answer")
        return self._pieces.pop(0) if self._pieces else b""

    def hush(self) -> None:
        """Nobody is told of any silence here."""

    def expect_end(self) -> None:
        self._pieces.clear()

    def close(self) -> None:
        self._pieces.clear()


class Client:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.body = b""
        self.sent: list[bytes] = []

    async def start(self, status: int, headers: Sequence[Header]) -> None:
        self.status = status
        self.headers = list(headers)

    def flush(self) -> None:
        """Nothing waits here."""

    async def send(self, data: bytes) -> None:
        self.sent.append(data)
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
    shape: AnswerShape = CHAT,
) -> Relayed:
    with (deadline := Deadline(started_s=monotonic(), limit_s=limit_s)):
        return await relay(
            cast("UpstreamResponse", answer or Answer(pieces)),
            client,
            shape=shape,
            own_headers=own,
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


STOP = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'
META = b'data: {"text":"a","meta_info":{"prompt_tokens":3,"completion_tokens":1,"finish_reason":%b}}\n\n'
MESSAGE = (
    b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":3,"output_tokens":0}}}\n\n'
    b'event: content_block_start\ndata: {"type":"content_block_start","index":0}\n\n'
)
MESSAGE_END = (
    b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},'
    b'"usage":{"output_tokens":1}}\n\n'
)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize(
    ("pieces", "operation", "last"),
    [
        ((ONE, STOP), Operation.CHAT, DONE),
        ((ONE + STOP,), Operation.CHAT, DONE),
        ((ONE, STOP, USAGE), Operation.CHAT, DONE),
        ((ONE, STOP[:-2].replace(b"stop", b"length") + b"\n\n"), Operation.CHAT, DONE),
        ((STOP.replace(b"delta", b"text"),), Operation.COMPLETIONS, DONE),
        ((META % b"null", META % b'{"type": "stop"}'), Operation.GENERATE, DONE),
        ((MESSAGE, MESSAGE_END), Operation.MESSAGES, '{"type":"message_stop"}'),
    ],
)
async def test_an_answer_that_is_whole_but_for_its_last_event_is_given_it(
    pieces: tuple[bytes, ...], operation: Operation, last: str, *, lost: bool
) -> None:
    client = Client()
    answer = Answer(pieces, lost=lost)
    relayed_ = await relayed(client, answer=answer, shape=AnswerShape(operation, stream=True))
    assert client.body.startswith(b"".join(pieces))
    assert client.events()[-1] == last
    assert "error" not in client.body.decode()
    assert (relayed_.failure is not None) is lost, "the instance is told of either way"


@pytest.mark.parametrize(
    ("pieces", "shape"),
    [
        ((ONE,), CHAT),
        ((STOP, ONE), CHAT),
        ((STOP.replace(b'"stop"', b"null"), USAGE), CHAT),
        ((STOP.replace(b'"stop"', b"null"),), CHAT),
        ((ONE, STOP), AnswerShape(Operation.CHAT, stream=True, answers=2)),
        ((META % b"null",), AnswerShape(Operation.GENERATE, stream=True)),
        ((MESSAGE,), AnswerShape(Operation.MESSAGES, stream=True)),
        (
            (MESSAGE, MESSAGE_END[MESSAGE_END.index(b"event: message_delta") :]),
            AnswerShape(Operation.MESSAGES, stream=True),
        ),
    ],
)
async def test_an_answer_that_lacks_more_ends_in_an_error(pieces: tuple[bytes, ...], shape: AnswerShape) -> None:
    client = Client()
    assert (await relayed(client, *pieces, shape=shape)).failure == FailureKind.CUT
    assert "the engine ended its stream" in client.body.decode()


@pytest.mark.parametrize("kind", [None, b"text/plain", b"application/octet-stream", b"application/json"])
@pytest.mark.parametrize("first", [ONE, b": hello\n\n" + ONE, b"event: x\n" + ONE, b"\n" + ONE])
async def test_a_stream_is_one_whatever_its_content_type(kind: bytes | None, first: bytes) -> None:
    client = Client()
    headers = [] if kind is None else [(b"content-type", kind)]
    answer = Answer((first, STOP, USAGE, b"data: [DONE]\n\n"), headers)
    relayed_ = await relayed(client, answer=answer)
    assert len(client.sent) == 4, "each piece goes out as it comes"
    assert relayed_.usage is not None
    assert dict(client.headers)[b"content-type"] == (kind or b"text/event-stream")
    assert b"content-length" not in dict(client.headers)


async def test_other_streams_go_out_as_they_come_and_json_as_a_whole() -> None:
    lines = Client()
    await relayed(lines, answer=Answer((b"{}\n", b"{}\n"), [(b"content-type", b"application/x-ndjson")]))
    assert lines.sent == [b"{}\n", b"{}\n"]
    text = Client()
    await relayed(text, answer=Answer((b'{"a":', b"1}"), [(b"content-type", b"application/json; charset=utf-8")]))
    assert (text.sent, text.body, dict(text.headers)[b"content-length"]) == ([], b'{"a":1}', b"7")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [[], [EVENTS], [(b"content-type", b"application/json")]])
async def test_a_success_without_a_body_is_the_engines_failure(headers: list[Header], *, stream: bool) -> None:
    client = Client()
    with pytest.raises(UpstreamFailureError, match="answered 200 with nothing") as failure:
        await relayed(client, answer=Answer((), headers), shape=AnswerShape(Operation.CHAT, stream=stream))
    assert failure.value.kind is FailureKind.EMPTY
    assert client.status == 0, "its client has been sent nothing, and gets an error"


async def test_an_answer_that_has_no_content_has_no_length() -> None:
    client = Client()
    assert (await relayed(client, answer=Answer((), [], status=204))).failure is None
    assert (client.status, client.headers) == (204, [])
