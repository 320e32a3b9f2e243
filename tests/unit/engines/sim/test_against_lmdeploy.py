"""What a simulated engine says, and what it reads of a body, against LMDeploy's own code."""

import importlib
import json
import re
import warnings
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engines.models.tiny import build_tiny
from engines.sim.bodies import ChatBody, CompletionBody, CountBody, GenerateBody, Generated, MessagesBody, ResponsesBody
from engines.sim.conversations import chat_of
from engines.sim.dialects import Dialect, Generate, OpenAi, Served, WholeAnswer
from engines.sim.refused_request import RefusedRequestError
from engines.sim.text import SimTokenizer, TextError
from engines.sim.typed_dialects import Messages, Responses

PIECES = (" a", " b", " c")
TEXT = "".join(PIECES)
SYSTEM = [
    {"type": "text", "text": "be"},
    {"type": "text", "text": "x-anthropic-billing-header: 1"},
    {"type": "text", "text": " brief"},
]
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "system", "content": "in the middle"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm"},
            {"type": "text", "text": "x"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "1"}]},
            {"type": "text", "text": "go"},
            {"type": "odd", "x": 3},
        ],
    },
    {"role": "assistant", "content": [{"type": "tool_result", "content": "q"}, {"type": "redacted_thinking"}]},
    {"role": "user", "content": [{"type": "text", "text": ""}]},
]
ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "d"},
    {"role": "user", "content": [{"type": "input_text", "text": "u"}, {"type": "input_text", "text": "v"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "o"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
]
RESPONSE: dict[str, Any] = {
    "model": "m",
    "input": "hi",
    "max_output_tokens": len(PIECES),
    "instructions": "be brief",
    "temperature": 0.5,
    "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": False}],
    "metadata": {"a": "b"},
}


def theirs(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"lmdeploy.serve.{name}")


def served(asked: Generated, name: str, *, pieces: int = len(PIECES), last: str = "", reason: str = "length") -> Served:
    return Served(
        name=name,
        request=asked,
        model="m",
        prompt_tokens=5,
        words=list(range(pieces)),
        reason=reason,
        created=7,
        last=[99] if last else [],
        last_text=last,
    )


def streamed(dialect: Dialect, request: Served) -> list[Any]:
    stream = dialect.stream(request)
    said = stream.begin()
    pieces = PIECES[: len(request.words)]
    for place, piece in enumerate(pieces):
        said += stream.more(piece, place + 1, [place])
    if request.reason == "stop":  # the token that ended it comes by itself
        said += stream.more("", len(pieces), [])
    return events((said + stream.end()).decode())


async def chunks(pieces: int = len(PIECES), last: str = "", reason: str = "length") -> AsyncIterator[Any]:
    """An answer as LMDeploy's runner tells it: the last of it has no text, or the stop word's. A stop token that is
    the first of all is told as a chunk without any.
    """
    delta = theirs("openai.protocol").DeltaMessage
    said = PIECES[:pieces] or ("",)
    for place, piece in enumerate((*said, last)):
        over = place == len(said)
        yield SimpleNamespace(
            delta_message=delta(role="assistant", content=piece),
            token_ids=([99] if last else []) if over else [place] * bool(pieces),
            logprobs=None,
            input_token_len=5,
            generate_token_len=pieces + bool(last) if over else min(place + 1, pieces),
            finish_reason=reason if over else None,
            is_last_delta=True,
            routed_experts=None,
            reasoning_tokens=0,
        )


def events(said: str) -> list[Any]:
    found = [event.partition("\ndata: ") for event in said.split("\n\n") if event]
    return [(kind, json.loads(data)) for kind, _, data in found]


def unnamed(said: Any) -> str:
    """Without the names that LMDeploy draws for messages."""
    return re.sub(r'"msg_\w+"', '"msg_"', json.dumps(said, sort_keys=True))


ENDS: list[dict[str, Any]] = [
    {},
    {"pieces": 2, "reason": "stop"},
    {"pieces": 2, "reason": "stop", "last": " end"},
    {"pieces": 0, "reason": "stop"},
    {"pieces": 0, "reason": "stop", "last": " end"},
]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("ids", [False, True])
async def test_messages_are_told_as_lmdeploy_tells_them(end: dict[str, Any], *, ids: bool) -> None:
    asked = MessagesBody(model="m", max_tokens=len(PIECES), input_ids=[1], return_token_ids=ids)
    request = SimpleNamespace(return_token_ids=ids, return_routed_experts=False, return_logprob=False, model="m")
    told = theirs("anthropic.streaming").stream_messages_response(chunks(**end), request_id="msg_x", request=request)
    assert streamed(Messages(), served(asked, "msg_x", **end)) == events("".join([event async for event in told]))
    protocol = theirs("anthropic.protocol")
    whole = protocol.MessagesResponse(
        id="msg_x",
        model="m",
        content=[protocol.MessageTextBlock(text=TEXT)],
        stop_reason="max_tokens",
        usage=protocol.MessageUsage(input_tokens=5, output_tokens=3),
        output_ids=[0, 1, 2] if ids else None,
    )
    assert Messages().whole([WholeAnswer(served(asked, "msg_x"), TEXT, 0)]) == whole.model_dump()


@pytest.mark.parametrize("end", ENDS)
async def test_responses_are_told_as_lmdeploy_tells_them(end: dict[str, Any]) -> None:
    ours = served(msgspec.convert(RESPONSE, ResponsesBody), "resp_x", **end)
    asked = theirs("openai.responses.protocol").ResponsesRequest(**RESPONSE, request_id="resp_x")
    made = chunks(**end)
    told = theirs("openai.responses.streaming").stream_response(made, request=asked, model_name="m", created_time=7)
    assert unnamed(streamed(Responses(), ours)) == unnamed(events("".join([event async for event in told])))
    text = "".join(PIECES[: len(ours.words)]) + ours.last_text
    counts: dict[str, Any] = {"input_tokens": 5, "output_tokens": ours.tokens, "reasoning_tokens": 0}
    whole = theirs("openai.responses.response").make_response(
        request=asked, model_name="m", created_time=7, finish_reason=ours.reason, text=text, **counts
    )
    assert unnamed(Responses().whole([WholeAnswer(ours, text, 0)])) == unnamed(whole.model_dump(exclude_none=True))


def test_generate_and_refusals_are_told_as_lmdeploy_tells_them() -> None:
    protocol = theirs("openai.protocol")
    meta = protocol.GenerateReqMetaOutput(finish_reason={"type": "length"}, prompt_tokens=5, completion_tokens=3)
    whole = protocol.GenerateReqOutput(text=TEXT, output_ids=[0, 1, 2], meta_info=meta)
    assert Generate().whole([WholeAnswer(served(GenerateBody(prompt="x"), "x"), TEXT, 0)]) == whole.model_dump()
    errors, code = theirs("anthropic.errors"), theirs("core.exceptions").ErrorCode
    for status, cause in ((404, code.MODEL_NOT_FOUND), (503, code.ENGINE_UNAVAILABLE), (400, code.INVALID_REQUEST)):
        why = RefusedRequestError(HTTPStatus(status), "why", param="p")
        flat = theirs("openai.errors").create_error_response(status, "why", param="p")
        assert OpenAi(chat=True).refusal(why) == Generate().refusal(why) == json.loads(flat.body)
        nested = theirs("openai.responses.request").error_response(status, "why", param="p", error_code=cause)
        assert Responses().refusal(why) == json.loads(nested.body)
        said = errors.create_request_error_response(theirs("core.exceptions").RequestError(cause, "why"))
        assert Messages().refusal(why) == json.loads(said.body)


def test_a_stop_word_ends_at_the_tokens_that_end_it_with_lmdeploy(tmp_path: Path) -> None:
    from lmdeploy.tokenizer import Tokenizer

    folder = build_tiny(tmp_path / "tiny")
    ours, tokenizer = SimTokenizer(folder), Tokenizer(str(folder))
    words = [
        "",
        " ",
        "e",
        "in",
        " in",
        "\n",
        "</s>",
        "é",
        "two words",
        " the",
        "the",
        ".",
        *map(ours.shown, ours.words[:8]),
    ]
    found = {word: ours.stop_tokens(word) for word in words}
    assert found == {word: frozenset(tokenizer.indexes_containing_token(word)) for word in words}
    assert {len(tokens) > 1 for tokens in found.values() if tokens} == {False, True}


@pytest.mark.parametrize("merge", [False, True])
def test_conversations_are_read_as_lmdeploy_reads_them(*, merge: bool) -> None:
    protocol, adapter = theirs("anthropic.protocol"), theirs("anthropic.adapter")
    body: dict[str, Any] = {"model": "m", "system": SYSTEM, "messages": TURNS}
    asked = protocol.MessagesRequest(**body, max_tokens=1)
    chat, _ = chat_of(msgspec.convert(body | {"max_tokens": 1}, MessagesBody), merge=merge)
    assert chat == adapter.to_openai_messages(asked, merge_inline_system=merge)
    counted, _ = chat_of(msgspec.convert(body, CountBody), merge=merge)
    asked = protocol.CountTokensRequest(**body)
    assert counted == adapter.to_lmdeploy_messages(asked, merge_inline_system=merge)
    body = {"model": "m", "instructions": "be brief", "input": ITEMS}
    asked = theirs("openai.responses.protocol").ResponsesRequest(**body)
    read = theirs("openai.responses.request").messages_from_input(asked)
    assert chat_of(msgspec.convert(body, ResponsesBody), merge=merge)[0] == read


MESSAGES = [{"role": "user", "content": "a"}]
ROUTES: list[tuple[type[Generated], str, dict[str, Any]]] = [
    (ChatBody, "openai.protocol.ChatCompletionRequest", {"model": "m", "messages": MESSAGES}),
    (CompletionBody, "openai.protocol.CompletionRequest", {"model": "m", "prompt": "a"}),
    (GenerateBody, "openai.protocol.GenerateReqInput", {"prompt": "a"}),
]
FUNCTION = {"name": "f", "description": None, "parameters": {}}
VALUES = ["a", "1", "0.5", "nan", 1, 0, -1, 1.5, None, [], [1], ["a"], {}, {"a": 1}, {"a": "x"}]
SHAPED: list[tuple[str, Any]] = [
    *(
        ("tools", [each])
        for each in ({}, 5, {"function": {}}, {"function": FUNCTION}, {"type": 5, "function": FUNCTION})
    ),
    ("tools", [{"function": {**FUNCTION, "parameters": []}}]),
    *(("tool_choice", each) for each in ("auto", "none", "any", {"type": "odd"}, {"type": "function"})),
    ("tool_choice", {"function": {"name": "f"}}),
    ("tool_choice", {"type": "function", "function": {"name": 5}}),
    ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{}]}}),
    ("tool_choice", {"allowed_tools": {"mode": "odd", "tools": []}}),
    *(("response_format", {"type": each}) for each in ("text", "json_object", "odd")),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}),
    *(("reasoning_effort", each) for each in ("low", "odd")),
    *(("stream_options", {"include_usage": each}) for each in (None, True, "odd")),
]
OUT_OF_RANGE = [("temperature", -1), ("temperature", "nan"), ("top_p", 1.5), ("top_p", -1), ("top_p", 0), ("top_k", -1)]
OUT_OF_RANGE += [("temperature", 3), ("min_p", 1.5), ("min_p", -1), ("top_p", "nan"), ("min_p", "nan")]
OUT_OF_RANGE += [("messages", []), ("top_logprobs_num", -1)]
"""What LMDeploy's types allow and its checks or its generation config then refuse; here it is all one."""


@pytest.mark.parametrize(("kind", "name", "body"), ROUTES)
def test_fields_are_of_the_types_that_lmdeploy_takes(kind: type[Generated], name: str, body: dict[str, Any]) -> None:
    module, _, model = name.rpartition(".")
    real = getattr(theirs(module), model)
    fields = [field for field in kind.__struct_fields__ if field in real.model_fields and field != "image_data"]
    tried = [(field, value) for field in fields for value in VALUES]
    tried += [(field, value) for field, value in SHAPED if field in kind.__struct_fields__]
    unlike = []
    for field, value in tried:
        said = {**body, field: value}
        if (field, value) in OUT_OF_RANGE:
            assert not is_taken(kind, said), said
        elif is_taken(kind, said) != is_valid(real, said):
            unlike.append((field, value))
    assert unlike == []
    assert set(real.model_fields) <= set(kind.__struct_fields__), "a field is passed over"


def is_taken(kind: type[Generated], said: dict[str, Any]) -> bool:
    try:
        msgspec.json.decode(json.dumps(said), type=kind, strict=False)
    except msgspec.ValidationError:
        return False
    return True


def is_valid(real: Any, said: dict[str, Any]) -> bool:
    try:
        real.model_validate_json(json.dumps(said))
    except ValueError:
        return False
    return True


def test_a_message_needs_a_role_and_no_content_as_with_lmdeploy(tmp_path: Path) -> None:
    tokenizer = SimTokenizer(build_tiny(tmp_path / "tiny"))
    for said in ({"role": "user"}, {"role": "user", "content": None}):
        assert tokenizer.chat([said], {}) == tokenizer.chat([{"role": "user", "content": ""}], {})
    with pytest.raises(TextError, match=r"messages\[1\] has no role"):
        tokenizer.chat([{"role": "user", "content": "a"}, {"content": "b"}], {})
