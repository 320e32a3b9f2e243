import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import InvalidRequestError
from gateway.fingerprint import ChatPrompt, TokenPrompt, Unreadable
from gateway.fingerprint.canonical import TextPrompt
from gateway.fingerprint.opaque import Opaque
from gateway.requests.call import parse_call
from gateway.types import Operation

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    more=st.dictionaries(st.text(min_size=1), JSON, max_size=4),
    ascii_only=st.booleans(),
    indent=st.none() | st.just(2),
    options=st.sampled_from(["absent", None, {}, {"include_usage": None, "x": 1}]),
)
def test_asking_for_usage_changes_nothing_else_in_any_body(
    *, more: dict[str, object], ascii_only: bool, indent: int | None, options: object
) -> None:
    internal = {"migration_request", "with_cache", "preserve_cache"}
    reserved = internal | {"session_id", "model", "stream", "stream_options", "prompt", "n", "max_tokens"}
    said = {key: value for key, value in more.items() if key not in reserved}
    said |= {"model": "m", "prompt": "x", "stream": True}
    if options != "absent":
        said["stream_options"] = options
    body = json.dumps(said, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    call = parse_call(Operation.COMPLETIONS, body)
    assert call.hide_usage
    sent = json.loads(call.body)
    assert sent["stream_options"]["include_usage"] is True
    said.pop("stream_options", None)
    del sent["stream_options"]
    assert sent == said


@pytest.mark.parametrize(
    "more", [{}, {"stream": False}, {"stream": None}, {"stream": True, "stream_options": {"include_usage": True}}]
)
def test_a_body_that_needs_no_change_stays_the_same_object(more: dict[str, object]) -> None:
    body = json.dumps({"model": "m", "prompt": "x"} | more).encode()
    call = parse_call(Operation.COMPLETIONS, body)
    assert call.body is body
    assert not call.hide_usage


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("x", TextPrompt(text="x")),
        (["x"], TextPrompt(text="x")),
        ([1, 2], TokenPrompt(token_ids=(1, 2))),
        ([[1, 2]], TokenPrompt(token_ids=(1, 2))),
        (["x", "y" * 9], Unreadable(reason="several_prompts", tokens=4)),
        ([[1], [2, 3]], Unreadable(reason="several_prompts", tokens=3)),
    ],
)
def test_every_shape_of_a_completions_prompt_is_understood(prompt: object, expected: object) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    assert parse_call(Operation.COMPLETIONS, body).prompt == expected


PROMPTS = st.one_of(
    st.tuples(st.text(min_size=1, max_size=3), st.just(1)),
    st.lists(st.integers(0, 9), min_size=1, max_size=300).map(lambda ids: (ids, 1)),
    st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=40).map(lambda texts: (texts, len(texts))),
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=40).map(
        lambda lists: (lists, len(lists))
    ),
)
COUNTS = st.none() | st.integers(1, 40)


@given(prompt=PROMPTS, n=COUNTS, best_of=COUNTS, most=st.integers(1, 60))
def test_a_request_is_bounded_by_the_sequences_that_an_engine_runs_for_it(
    prompt: tuple[object, int], n: int | None, best_of: int | None, most: int
) -> None:
    said, prompts = prompt
    answers = prompts * max(n or 1, best_of or 1)
    fields = {"n": n, "best_of": best_of}
    body = json.dumps({"model": "m", "prompt": said} | {name: each for name, each in fields.items() if each}).encode()
    if answers <= most:
        call = parse_call(Operation.COMPLETIONS, body, most_answers=most)
        assert (call.prompts, call.answers) == (prompts, answers)
    else:
        with pytest.raises(InvalidRequestError, match=f"needs {answers} answers .* at most {most} ") as caught:
            parse_call(Operation.COMPLETIONS, body, most_answers=most)
        assert caught.value.reason == "too_many_answers"


@pytest.mark.parametrize(
    ("operation", "fields"),
    [
        (Operation.CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 129}),
        (Operation.CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 10**18}),
        (Operation.COMPLETIONS, {"prompt": ["x"] * 160_000}),
        (Operation.EMBEDDINGS, {"input": ["x"] * 2049}),
        (Operation.EMBEDDINGS, {"input": [[1]] * 2049}),
    ],
)
def test_no_route_lets_one_request_become_very_many(operation: Operation, fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="send several requests"):
        parse_call(operation, json.dumps({"model": "m"} | fields).encode())


_WITH_STOPS = [
    (Operation.CHAT, {"messages": [{"role": "user", "content": "x"}]}, "stop"),
    (Operation.COMPLETIONS, {"prompt": "x"}, "stop"),
    (Operation.RESPONSES, {"input": "x"}, "stop"),
    (Operation.MESSAGES, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, "stop_sequences"),
    (Operation.GENERATE, {"prompt": "x"}, "stop"),
    (Operation.GENERATE, {"prompt": "x"}, "stop_token_ids"),
]


@pytest.mark.parametrize("stops", [[7] * 65, ["x"] * 200_000, ["x" * 8193], ["x" * 4097] * 2, "x" * 8193])
@pytest.mark.parametrize(("operation", "fields", "name"), _WITH_STOPS)
def test_stops_that_would_occupy_an_engines_server_are_refused_on_every_route(
    operation: Operation, fields: dict[str, object], name: str, stops: object
) -> None:
    with pytest.raises(InvalidRequestError, match="send fewer or shorter ones") as caught:
        parse_call(operation, json.dumps({"model": "m", **fields, name: stops}).encode())
    assert (caught.value.param, caught.value.reason) == (name, "too_many_stops")


@pytest.mark.parametrize("stops", [None, "x", [], ["x" * 128] * 64, 7, [7] * 64, {"x": 1}])
@pytest.mark.parametrize(("operation", "fields", "name"), _WITH_STOPS)
def test_other_stops_are_the_engines_to_check(
    operation: Operation, fields: dict[str, object], name: str, stops: object
) -> None:
    body = json.dumps({"model": "m", **fields, name: stops}).encode()
    assert parse_call(operation, body).body == body


def test_a_long_text_of_token_ids_to_embed_is_one_text() -> None:
    assert parse_call(Operation.EMBEDDINGS, json.dumps({"model": "m", "input": [7] * 5000}).encode()).prompts == 1


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        (["x", ""], "prompt[1]"),
        (["x", 1], "prompt[1]"),
        ([[]], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        ([[1], "x"], "prompt[1]"),
        ([[1, -2]], "prompt[0][1]"),
        ([1, -1], "prompt[1]"),
        ([1.5], "prompt[0]"),
        ([1, True], "prompt[1]"),
        ([None], "prompt[0]"),
        ([{}], "prompt[0]"),
        ([1, "x"], "prompt[1]"),
    ],
)
def test_a_prompt_that_no_engine_can_take_is_refused_by_name(prompt: object, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_call(Operation.COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode())
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [], "input_ids": None}, "messages"),
        ({"messages": [], "input_ids": []}, "input_ids"),
        ({"messages": [], "input_ids": [1, -1]}, "input_ids[1]"),
        ({"messages": [], "input_ids": [1.5]}, "input_ids[0]"),
        ({"messages": [], "input_ids": [True]}, "input_ids[0]"),
        ({"messages": [{"role": "user", "content": "x"}], "input_ids": [-1]}, "input_ids[0]"),
    ],
)
def test_a_chat_without_a_prompt_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_call(Operation.CHAT, json.dumps({"model": "m"} | fields).encode())
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["migration_request", "with_cache", "preserve_cache"])
@pytest.mark.parametrize("value", [None, False, True, {"protocol": 1}])
def test_fields_of_engines_among_themselves_are_refused(name: str, value: object) -> None:
    bodies = {
        Operation.CHAT: {"messages": [{"role": "user", "content": "x"}]},
        Operation.COMPLETIONS: {"prompt": "x"},
    }
    for operation, fields in bodies.items():
        text = json.dumps({"model": "m", name: value} | fields)
        for body in (text, text.replace(name, f"\\u00{ord(name[0]):x}{name[1:]}")):
            with pytest.raises(InvalidRequestError) as caught:
                parse_call(operation, body.encode())
            assert caught.value.param == name


BODIES: dict[Operation, dict[str, object]] = {
    Operation.CHAT: {"messages": [{"role": "user", "content": "x"}]},
    Operation.COMPLETIONS: {"prompt": "x"},
    Operation.RESPONSES: {"input": "x"},
    Operation.MESSAGES: {"messages": [{"role": "user", "content": "x"}]},
    Operation.EMBEDDINGS: {"input": "x"},
    Operation.GENERATE: {"prompt": "x"},
}


@pytest.mark.parametrize("operation", list(BODIES))
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", [7, -1, None, "x", {"a": [1]}])
def test_a_session_id_of_a_client_is_not_forwarded(operation: Operation, value: object, *, stream: bool) -> None:
    rest = {"model": "m", "stream": stream, "seed": 1e3, "stop": ["\u00e9"], **BODIES[operation]}
    for text in (
        json.dumps({"session_id": value, **rest}),
        json.dumps({**rest, "session_id": value}, indent=2),
        json.dumps({"session_id": value, **rest}).replace("session_id", "sess\\u0069on_id"),
    ):
        call = parse_call(operation, text.encode())
        sent = json.loads(call.body)
        sent.pop("stream_options", None)
        assert sent == rest
        assert call.stream is stream


def test_bytes_that_are_not_utf8_are_said_to_be_so_without_a_place() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_call(Operation.CHAT, b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}')
    assert str(caught.value) == "the request body is not JSON: it is not valid UTF-8"


def test_a_chat_without_messages_may_bring_tokens() -> None:
    body = json.dumps({"model": "m", "messages": [], "input_ids": [3, 4]}).encode()
    assert parse_call(Operation.CHAT, body).prompt == TokenPrompt(token_ids=(3, 4))


def test_keys_that_only_look_doubled_are_allowed() -> None:
    schema = {"properties": {"model": {"type": "string"}, "stream": {"type": "boolean"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    content = 'say "model": and \\u0041'
    said = {"model": "m", "messages": [{"role": "user", "content": content}], "tools": [tool], "stream": False}
    call = parse_call(Operation.CHAT, json.dumps(said).encode())
    assert isinstance(call.prompt, ChatPrompt)
    assert call.prompt.messages[0]["content"] == content


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","prompt":"x","model":"n"}',
        b'{"model":"m","prompt":"x","prom\\u0070t":"y"}',
        b'{"stream":false,"model":"m","prompt":"x","stream":true}',
        b'{"model":"m","prompt":"x","max_tokens":1,"max_tokens":9999}',
        b'{"model": "m", "prompt": "x", "n": 1, "n": 64}',
        b'{ "model" : "m" , "n" : 1 , "prompt" : "x" , "unknown" : 1 , "unknown" : 1 }',
        b'\n{"n": 1,\n "model": "m", "prompt": "x", "n": 1}\n',
    ],
)
def test_a_key_given_twice_is_refused_by_name(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="more than once"):
        parse_call(Operation.COMPLETIONS, body)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\t", " :\r\n ")])
@pytest.mark.parametrize("text", ["plain", 'n: "n": 1', "ü", "\\ \\u0041"])
def test_however_fields_are_written_once_is_right(separators: tuple[str, str], text: str) -> None:
    said = {"model": "m", "prompt": text, "n": 1, "metadata": {"n": 1, "model": [{"n": 2}]}, "ünïcode": None}
    for ascii_only in (True, False):
        body = json.dumps(said, separators=separators, ensure_ascii=ascii_only)
        assert parse_call(Operation.COMPLETIONS, f" {body}\n".encode()).prompt == TextPrompt(text=text)


@pytest.mark.parametrize(
    ("operation", "body", "tokens", "answers"),
    [
        (Operation.CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "n": 2}, 3, 2),
        (
            Operation.CHAT,
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "max_completion_tokens": 4},
            4,
            1,
        ),
        (Operation.COMPLETIONS, {"prompt": ["x", "y"], "max_tokens": 5, "n": 2}, 5, 4),
        (Operation.COMPLETIONS, {"prompt": [1, 2]}, None, 1),
        (Operation.RESPONSES, {"input": "x", "max_output_tokens": 6}, 6, 1),
        (Operation.MESSAGES, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 7}, 7, 1),
        (Operation.GENERATE, {"prompt": "x", "max_tokens": 8}, 8, 1),
    ],
)
def test_a_call_says_how_many_tokens_it_may_cost(
    operation: Operation, body: dict[str, object], tokens: int | None, answers: int
) -> None:
    call = parse_call(operation, json.dumps({"model": "m", **body}).encode())
    assert (call.answer_tokens, call.answers) == (tokens, answers)


def test_generate_needs_no_model_while_only_one_is_served() -> None:
    assert parse_call(Operation.GENERATE, b'{"prompt":"x"}', models=lambda: ["only"]).model == "only"
    with pytest.raises(InvalidRequestError, match="a, b"):
        parse_call(Operation.GENERATE, b'{"prompt":"x"}', models=lambda: ["a", "b"])
    with pytest.raises(InvalidRequestError, match="model"):
        parse_call(Operation.CHAT, b'{"messages":[{"role":"user","content":"x"}]}', models=lambda: ["only"])


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        (Operation.EMBEDDINGS, {"input": ["a", "b"]}),
        (Operation.COUNT_TOKENS, {"messages": []}),
        (Operation.COMPLETIONS, {"prompt": ["a", "b"]}),
    ],
)
def test_what_has_no_text_passes_without_a_fingerprint(operation: Operation, body: dict[str, object]) -> None:
    assert isinstance(parse_call(operation, json.dumps({"model": "m", **body}).encode()).prompt, Unreadable)


def user(*parts: object) -> dict[str, object]:
    return {"role": "user", "content": list(parts)}


IMAGE, NEW, TEXT = {"type": "image", "source": {}}, {"type": "new"}, {"type": "text", "text": "x"}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, IMAGE]}


@pytest.mark.parametrize(
    ("operation", "body", "contents"),
    [
        (Operation.MESSAGES, {"messages": [user(TEXT, IMAGE)]}, [["x", Opaque(IMAGE, "multimodal")]]),
        (Operation.MESSAGES, {"messages": [user(NEW)]}, [[Opaque(NEW, "unknown_parts")]]),
        (Operation.MESSAGES, {"messages": [user("?")]}, [[Opaque("?", "unknown_parts")]]),
        (Operation.MESSAGES, {"messages": [{"role": "user", "content": 7}]}, [[Opaque(7, "unknown_parts")]]),
        (Operation.MESSAGES, {"messages": [user(RESULT)]}, ["x", [Opaque(IMAGE, "multimodal")]]),
        (
            Operation.MESSAGES,
            {"messages": [], "input_ids": [3], "image_data": ["y"]},
            [[Opaque([3], "multimodal"), Opaque("y", "multimodal")]],
        ),
        (
            Operation.CHAT,
            {"messages": [], "input_ids": [3], "image_data": "y"},
            [[Opaque([3], "multimodal"), Opaque("y", "multimodal")]],
        ),
        (
            Operation.RESPONSES,
            {"input": [user({"type": "input_text", "text": "x"}, {"type": "input_image"})]},
            [["x", Opaque({"type": "input_image"}, "multimodal")]],
        ),
        (Operation.RESPONSES, {"input": [user(NEW)]}, [[Opaque(NEW, "unknown_parts")]]),
        (Operation.RESPONSES, {"input": ["?"]}, [[Opaque("?", "unknown_parts")]]),
        (
            Operation.RESPONSES,
            {"input": [{"role": "system", "content": [NEW]}, {"role": "system", "content": "x"}]},
            ["x", [Opaque(NEW, "unknown_parts")]],
        ),
        (Operation.GENERATE, {"prompt": "x", "image_data": "y"}, [["x", Opaque("y", "multimodal")]]),
    ],
)
def test_parts_that_are_no_text_stay_where_they_are(
    operation: Operation, body: dict[str, object], contents: list[object]
) -> None:
    prompt = parse_call(operation, json.dumps({"model": "m", **body}).encode()).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.gap in {"multimodal", "unknown_parts"}
    assert [each["content"] for each in prompt.messages] == contents


@pytest.mark.parametrize(
    ("operation", "body", "param"),
    [
        (Operation.EMBEDDINGS, {"input": ""}, "input"),
        (Operation.EMBEDDINGS, {}, "input"),
        (Operation.RESPONSES, {"input": []}, "input"),
        (Operation.RESPONSES, {}, "input"),
        (Operation.MESSAGES, {"messages": []}, "messages"),
        (Operation.MESSAGES, {"input_ids": [-1]}, "input_ids[0]"),
        (Operation.GENERATE, {}, "prompt"),
        (Operation.GENERATE, {"prompt": "x", "input_ids": [1]}, "prompt"),
        (Operation.GENERATE, {"prompt": ""}, "prompt"),
    ],
)
def test_what_no_engine_could_take_is_named(operation: Operation, body: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        parse_call(operation, json.dumps({"model": "m", **body}).encode())
    assert refused.value.param == param
