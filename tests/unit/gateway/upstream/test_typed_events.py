"""What the gateway adds to a stream of Responses or Messages continues it, wherever it is cut."""

import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import UpstreamFailedError
from gateway.types import Operation, Usage
from gateway.upstream.relay import AnswerShape, scanner_for
from lab.conformance.dialects import disorder, messages_events, responses_events

ERROR = UpstreamFailedError("the engine's connection ended within its answer", code="upstream_cut")
USAGE = {"prompt_tokens": 9, "completion_tokens": 4}
Stream = Callable[[str, str, int, dict[str, int]], list[bytes]]
DIALECTS: list[tuple[Operation, Stream]] = [
    (Operation.RESPONSES, responses_events),
    (Operation.MESSAGES, messages_events),
]


def ended(operation: Operation, events: Sequence[bytes], size: int) -> str:
    """The stream as its client has it, of which these bytes came in chunks of this size."""
    scanner = scanner_for(AnswerShape(operation, stream=True))
    data = b"".join(events)
    out = b"".join(scanner.feed(data[start : start + size]) for start in range(0, len(data), size))
    return (out + scanner.ending(ERROR)).decode()


@given(
    dialect=st.sampled_from(DIALECTS),
    chunks=st.integers(0, 6),
    cut=st.tuples(st.integers(0, 12), st.integers(0, 40)),
    size=st.sampled_from([1, 7, 100, 10_000]),
    noise=st.sampled_from([b"", b": a comment\n\n", b'event: ping\ndata: {"type": "ping"}\n\n', b"retry: 100\n\n"]),
)
def test_wherever_a_stream_is_cut_it_is_continued_in_order(
    dialect: tuple[Operation, Stream], chunks: int, cut: tuple[int, int], size: int, noise: bytes
) -> None:
    operation, stream = dialect
    events = stream("m", 'say "sequence_number": 99', chunks, USAGE)
    whole = min(cut[0], len(events) - 1)
    noisy = [each for event in events[:whole] for each in (event, noise)]
    said = ended(operation, [*noisy, events[whole][: cut[1]]], size)
    assert disorder(said) is None
    assert "upstream_cut" in said or "ended within its answer" in said


def test_a_response_ends_with_an_error_and_with_the_response_as_failed() -> None:
    events = responses_events("m", "tok", 4, USAGE)
    said = ended(Operation.RESPONSES, events[:6], 50).split("\n\n")[-4:-1]
    kinds = [each.partition("\n")[0].removeprefix("event: ") for each in said]
    assert kinds == ["response.output_item.done", "error", "response.failed"]
    item, error, failed = [json.loads(each.partition("data: ")[2]) for each in said]
    assert [each["sequence_number"] for each in (item, error, failed)] == [6, 7, 8]
    assert (item["output_index"], item["item"]["id"], item["item"]["status"]) == (0, "msg_1", "incomplete")
    assert (error["code"], error["message"]) == ("upstream_cut", ERROR.message)
    assert (failed["response"]["id"], failed["response"]["status"]) == ("resp_1", "failed")
    assert failed["response"]["error"]["code"] == "upstream_cut"


@pytest.mark.parametrize("chunks", [0, 1, 63, 64, 65, 300])
def test_an_open_item_is_closed_with_its_text_so_far(chunks: int) -> None:
    from openai.types.responses import ResponseOutputItemDoneEvent

    events = responses_events("m", "tok ", 400, USAGE)
    first = next(place for place, event in enumerate(events) if event.startswith(b"event: response.output_text.delta"))
    said = ended(Operation.RESPONSES, events[: first + chunks], 1000)
    closed = next(each for each in said.split("\n\n") if each.startswith("event: response.output_item.done"))
    event = ResponseOutputItemDoneEvent.model_validate_json(closed.partition("data: ")[2])
    assert event.item.type == "message"
    assert event.item.status == "incomplete"
    deltas = [json.loads(each.partition(b"data: ")[2])["delta"] for each in events[first : first + chunks]]
    assert "".join(getattr(part, "text", "") for part in event.item.content) == "".join(deltas)


@pytest.mark.parametrize(
    ("item", "delta", "expected"),
    [
        (
            {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": ""},
            "response.function_call_arguments.delta",
            {"arguments": '{"a": "b'},
        ),
        (
            {"type": "reasoning", "id": "rs_1", "summary": []},
            "response.reasoning_text.delta",
            {"content": [{"type": "reasoning_text", "text": '{"a": "b'}]},
        ),
        (
            {"type": "message", "id": "m_1", "role": "assistant", "content": []},
            "response.output_text.delta",
            {"content": [{"type": "output_text", "text": '{"a": "b', "annotations": []}]},
        ),
    ],
)
def test_items_of_any_kind_are_closed_with_what_came_of_them(
    item: dict[str, object], delta: str, expected: dict[str, object]
) -> None:
    def event(kind: str, **said: object) -> bytes:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **said})}\n\n".encode()

    events = [event("response.output_item.added", output_index=1, item=item)]
    if item["type"] == "reasoning":
        part = {"type": "reasoning_text", "text": ""}
        events.append(event("response.content_part.added", output_index=1, content_index=0, part=part))
    events += [event(delta, output_index=1, delta=text) for text in ('{"a"', ': "b')]
    events += [b"event: response.output_text.delta\ndata: {broken\n\n"]
    said = ended(Operation.RESPONSES, events, 50)
    closed = next(each for each in said.split("\n\n") if each.startswith("event: response.output_item.done"))
    assert json.loads(closed.partition("data: ")[2])["item"] == item | {"status": "incomplete"} | expected


def test_a_response_that_was_never_begun_ends_with_the_error_alone() -> None:
    said = ended(Operation.RESPONSES, [], 1)
    assert said.startswith("event: error\n")
    assert json.loads(said.partition("data: ")[2])["sequence_number"] == 0
    assert said.count("event: ") == 1


@pytest.mark.parametrize("broken", [b'data: {"type": "response.created", "response": 7}\n\n', b"data: {nothing\n\n"])
def test_events_that_can_not_be_read_are_passed_on_and_continued_as_far_as_they_can_be(broken: bytes) -> None:
    said = ended(Operation.RESPONSES, [broken], 10)
    assert said.encode().startswith(broken)
    assert said.count("event: error") == 1


@pytest.mark.parametrize(("operation", "stream"), DIALECTS)
def test_a_whole_stream_counts_its_usage_and_is_over(operation: Operation, stream: Stream) -> None:
    scanner = scanner_for(AnswerShape(operation, stream=True))
    data = b"".join(stream("m", "tok", 3, USAGE))
    assert scanner.feed(data) == data
    assert (scanner.done, scanner.failed) == (True, False)
    if operation is Operation.MESSAGES:
        assert scanner.usage == Usage(prompt_tokens=9, completion_tokens=4, cached_tokens=None)
