import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.types import Operation, Usage
from gateway.upstream.relay import AnswerShape, scanner_for
from gateway.upstream.sse import EventScanner
from gateway.upstream.usage import usage_of_answer

ENDS = ["\n\n", "\r\n\r\n", "\r\r", "\n\r\n", "\r\n\n"]
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
LINES = st.sampled_from(
    [
        'data: {"choices":[{"delta":{"content":"中文"}}],"usage":null}',
        'data:{"choices":[{"text":"\\"usage\\" [DONE]"}]}',
        ": a comment",
        "event: note\ndata: one\ndata: two",
        'data: {"usage": "not a usage"}',
        'data: {broken "usage"',
        "id: 7",
        'data: {"choices":[],"usage":null,"x":{"usage": null}}',
    ]
)


def feed(scanner: EventScanner, data: bytes, sizes: Sequence[int]) -> bytes:
    out = b""
    start = 0
    while start < len(data):
        size = sizes[start % len(sizes)]
        out += scanner.feed(data[start : start + size])
        start += size
    return out + scanner.rest()


@given(
    events=st.lists(st.tuples(LINES, st.sampled_from(ENDS)), max_size=8),
    tail=st.sampled_from(["", "data: x", "data: x\n"]),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    hide=st.booleans(),
)
def test_any_stream_in_any_chunks_comes_out_byte_for_byte(
    events: list[tuple[str, str]], tail: str, sizes: list[int], *, hide: bool
) -> None:
    data = ("".join(line + end for line, end in events) + tail).encode()
    assert feed(EventScanner(hide_usage=hide), data, sizes) == data


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("hide", [False, True])
def test_usage_is_found_and_hidden_when_nobody_asked_for_it(end: str, size: int, *, hide: bool) -> None:
    first = 'data: {"choices":[{"delta":{}}],"usage":null}' + end
    usage = "data: " + json.dumps({"choices": [], "usage": USAGE}) + end
    done = "data: [DONE]" + end
    scanner = EventScanner(hide_usage=hide)
    out = feed(scanner, (first + usage + done).encode(), [size])
    assert scanner.usage == Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4)
    assert scanner.done
    assert not scanner.failed
    assert out.decode().replace("\r", "").replace("\n", "") == (
        (first + done if hide else first + usage + done).replace("\r", "").replace("\n", "")
    )
    assert ("prompt_tokens" in out.decode()) != hide


def test_usage_beside_choices_is_noted_and_never_hidden() -> None:
    event = b"data: " + json.dumps({"choices": [{"index": 0}], "usage": USAGE}).encode() + b"\n\n"
    scanner = EventScanner(hide_usage=True)
    assert scanner.feed(event) == event
    assert scanner.usage is not None


def test_usage_is_found_beside_a_null_one_further_in() -> None:
    event = b"data: " + json.dumps({"choices": [], "x": {"usage": None}, "usage": USAGE}).encode() + b"\n\n"
    scanner = EventScanner(hide_usage=True)
    assert scanner.feed(event) == b""
    assert scanner.usage is not None


def test_half_an_event_is_held_back() -> None:
    scanner = EventScanner(hide_usage=False)
    assert scanner.feed(b"data: 1\n\ndata: {half") == b"data: 1\n\n"
    assert scanner.feed(b" done}\n") == b""
    assert scanner.feed(b"\n") == b"data: {half done}\n\n"


def test_an_endless_event_is_let_pass_rather_than_held() -> None:
    scanner = EventScanner(hide_usage=False)
    piece = b"x" * (1 << 20)
    assert b"".join(scanner.feed(piece) for _ in range(6)) + scanner.rest() == piece * 6


def test_done_in_a_text_is_not_the_end_and_an_error_event_is_noticed() -> None:
    scanner = EventScanner(hide_usage=False)
    scanner.feed(b'data: {"choices":[{"text":"[DONE]"}]}\n\n')
    assert not scanner.done
    scanner.feed(b'data: {"choices":[{"text":"x"}],"error":null}\n\n')
    assert not scanner.failed
    scanner.feed(b'data: {"error":{"message":"m"}}\n\n')
    assert scanner.failed


def test_usage_of_a_whole_answer() -> None:
    assert usage_of_answer(json.dumps({"choices": [], "usage": USAGE}).encode()) == Usage(
        prompt_tokens=5, completion_tokens=2, cached_tokens=4
    )
    assert usage_of_answer(b'{"usage":{"prompt_tokens":3,"completion_tokens":null}}') == Usage(
        prompt_tokens=3, completion_tokens=0, cached_tokens=None
    )
    less = b'{"usage":{"prompt_tokens":-9,"completion_tokens":-5,"prompt_tokens_details":{"cached_tokens":-3}}}'
    assert usage_of_answer(less) == Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=None)
    more = b'{"usage":{"prompt_tokens":9,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":10}}}'
    assert usage_of_answer(more) == Usage(prompt_tokens=9, completion_tokens=5, cached_tokens=None)
    beside = b'{"usage":{"input_tokens":9,"output_tokens":5,"cache_read_input_tokens":10}}'
    assert usage_of_answer(beside) == Usage(prompt_tokens=9, completion_tokens=5, cached_tokens=10)
    for body in (b"", b"[]", b"{", b'{"usage":null}', b'{"usage":7}', b"[" * 100_000):
        assert usage_of_answer(body) is None


def event(name: str, **data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode()


def scanned(operation: Operation, stream: bytes, size: int) -> EventScanner:
    scanner = scanner_for(AnswerShape(operation, stream=True))
    assert feed(scanner, stream, [size]) == stream
    return scanner


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_of_messages_counts_the_prompt_at_its_start_and_the_answer_at_its_end(size: int) -> None:
    start = event("message_start", message={"id": "m", "usage": {"input_tokens": 9, "output_tokens": 1}})
    text = event("content_block_delta", index=0, delta={"type": "text_delta", "text": 'message_stop "error"'})
    delta = event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 5})
    scanner = scanned(Operation.MESSAGES, start + text + delta, size)
    assert not scanner.done
    assert not scanner.failed
    scanner = scanned(Operation.MESSAGES, start + text + delta + event("message_stop"), size)
    assert scanner.done
    assert scanner.usage == Usage(prompt_tokens=9, completion_tokens=5, cached_tokens=None)


def test_an_error_within_messages_is_noticed() -> None:
    scanner = scanned(Operation.MESSAGES, event("error", error={"type": "api_error", "message": "m"}), 100)
    assert scanner.failed
    assert not scanner.done


@pytest.mark.parametrize(("last", "failed"), [("completed", False), ("incomplete", False), ("failed", True)])
def test_a_stream_of_responses_ends_with_a_typed_event_that_has_the_usage(last: str, *, failed: bool) -> None:
    usage = {"input_tokens": 9, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 8}}
    text = event("response.output_text.delta", delta="response.completed")
    scanner = scanned(Operation.RESPONSES, text + event(f"response.{last}", response={"usage": usage}), 11)
    assert scanner.done
    assert scanner.failed is failed
    assert scanner.usage == Usage(prompt_tokens=9, completion_tokens=5, cached_tokens=8)
    assert not scanned(Operation.RESPONSES, text, 11).done


def test_a_stream_of_generate_has_its_usage_in_its_last_piece() -> None:
    pieces = b"".join(
        b'data: {"text":"a","meta_info":{"prompt_tokens":3,"completion_tokens":%d,"finish_reason":null}}\n\n' % number
        for number in (1, 2)
    )
    scanner = scanned(Operation.GENERATE, pieces + b"data: [DONE]\n\n", 9)
    assert scanner.done
    assert scanner.usage == Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=None)


def test_usage_of_whole_answers_in_other_dialects() -> None:
    assert usage_of_answer(b'{"type":"message","usage":{"input_tokens":3,"output_tokens":4}}') == Usage(
        prompt_tokens=3, completion_tokens=4, cached_tokens=None
    )
    assert usage_of_answer(b'{"text":"x","meta_info":{"prompt_tokens":3,"completion_tokens":4}}') == Usage(
        prompt_tokens=3, completion_tokens=4, cached_tokens=None
    )


BAD_TEXT = b'{"type": "\xff", "choices": [], "usage": {"prompt_tokens": 5}}'


def test_what_is_no_text_is_passed_on_and_counts_nothing() -> None:
    assert usage_of_answer(BAD_TEXT) is None
    for operation in Operation:
        scanner = scanner_for(AnswerShape(operation, stream=True))
        event = b"data: " + BAD_TEXT.replace(b"choices", b"message_start") + b"\n\n"
        assert scanner.feed(event) == event
        assert scanner.usage is None


@pytest.mark.parametrize(
    ("event", "found"),
    [
        ('{"usage": {"prompt_tokens": 3}, "choices": [], "more": {"usage": null}}', 3),
        ('{"more": {"usage": null}, "choices": [], "usage":{"prompt_tokens": 3}}', 3),
        ('{"usage": null}', None),
        ('{"text": "\\"usage\\": 7", "usage":null}', None),
    ],
)
def test_usage_is_found_wherever_its_field_stands_beside_one_that_is_null(event: str, found: int | None) -> None:
    scanner = EventScanner(hide_usage=False)
    scanner.feed(b"data: " + event.encode() + b"\n\n")
    assert (scanner.usage.prompt_tokens if scanner.usage else None) == found


@pytest.mark.parametrize("before", ["", ": a comment\n", "event: x\n", "data:\n", "data: {\n", "\n\n"])
def test_done_is_that_word_alone_whatever_lines_stand_before_it(before: str) -> None:
    scanner = EventScanner(hide_usage=False)
    scanner.feed(before.encode() + b"data: [DONE]\n\n")
    assert scanner.done is ("data" not in before)
