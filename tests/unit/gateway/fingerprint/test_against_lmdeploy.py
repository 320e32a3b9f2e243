"""The gateway's rendering and encoding against LMDeploy's own code, on the same tokenizer."""

import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from engines.models.tiny import build_tiny
from gateway.fingerprint import ChatPrompt, ModelTokenizer, canonical_chat, load_tokenizer
from gateway.requests.call import parse_call
from gateway.types import Operation
from kvcontrol.core.hashing import token_bytes

pytestmark = pytest.mark.filterwarnings(
    "ignore:max_tokens is deprecated:DeprecationWarning"  # LMDeploy reads its own deprecated field
)

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
OTHER = {"type": "function", "function": {"name": "g", "description": "does g"}}

REQUESTS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [{"role": "user", "content": "hi"}]},
    "system and turns": {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "é 中文 \n\n tabs\t"},
        ]
    },
    "the assistant is continued": {
        "messages": [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, two"}]
    },
    "text parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    },
    "null and missing content": {
        "messages": [{"role": "user", "content": None}, {"role": "assistant"}, {"role": "user", "content": "x"}]
    },
    "tool calls": {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "7", "tool_call_id": "1"},
        ],
        "tools": [TOOL, OTHER],
    },
    "one tool chosen": {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [TOOL, OTHER],
        "tool_choice": {"type": "function", "function": {"name": "g"}},
    },
    "template arguments": {
        "messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": {"tone": "dry", "reasoning_effort": "low"},
        "enable_thinking": True,
    },
    "reasoning effort": {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "high"},
}

TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% if tone is defined %}TONE {{ tone }}{% endif %}"
    "{% if enable_thinking is defined %}THINK {{ enable_thinking }}{% endif %}"
    "{% if reasoning_effort is defined %}EFFORT {{ reasoning_effort }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.a + 1 }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoTokenizer

    made = build_tiny(tmp_path_factory.mktemp("models") / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def ours(folder: Path) -> ModelTokenizer:
    return load_tokenizer(folder)


class Theirs:
    """What LMDeploy's api_server does between the request's body and the engine, with its own functions."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = importlib.import_module("lmdeploy.model")
            tokenizer = importlib.import_module("lmdeploy.tokenizer")
            self.protocol = importlib.import_module("lmdeploy.serve.openai.protocol")
            self.parsers = importlib.import_module("lmdeploy.serve.parsers.response_parser")
            self.tools = importlib.import_module("lmdeploy.serve.parsers.tool_parser.tool_parser")
            self.runner = importlib.import_module("lmdeploy.serve.core.chat_runner")
            processors = importlib.import_module("lmdeploy.serve.processors.multimodal")
            self.processor = processors.MultimodalProcessor(
                tokenizer.Tokenizer(str(folder)), model.HFChatTemplate(str(folder))
            )

    async def encode(self, body: dict[str, Any]) -> list[int]:
        return await self.encode_request(self.protocol.ChatCompletionRequest(model="m", **body))

    async def encode_messages(self, body: dict[str, Any]) -> list[int]:
        """What its ``/v1/messages`` does."""
        protocol = importlib.import_module("lmdeploy.serve.anthropic.protocol")
        adapter = importlib.import_module("lmdeploy.serve.anthropic.adapter")
        said = protocol.MessagesRequest(model="m", max_tokens=1, **body)
        merge = not adapter.detect_inline_system_support(self.processor.chat_template)
        return await self.encode_request(
            self.protocol.ChatCompletionRequest(
                model="m",
                messages=adapter.to_openai_messages(said, merge_inline_system=merge),
                tools=adapter.to_openai_tools(said.tools),
                tool_choice=adapter.normalize_tool_choice(said.tool_choice),
            )
        )

    async def encode_responses(self, body: dict[str, Any]) -> list[int]:
        """What its ``/v1/responses`` does."""
        protocol = importlib.import_module("lmdeploy.serve.openai.responses.protocol")
        asked = importlib.import_module("lmdeploy.serve.openai.responses.request")
        said = protocol.ResponsesRequest(model="m", **body)
        tools = asked.openai_tools_from_responses(said)
        choice = asked.tool_choice_from_responses(said.tool_choice, tools)
        return await self.encode_request(
            self.protocol.ChatCompletionRequest(
                model="m",
                messages=asked.messages_from_input(said),
                tools=tools if tools and choice != "none" else None,
                tool_choice=choice,
            )
        )

    async def encode_request(self, request: Any) -> list[int]:
        request = self.parsers.normalize_chat_request(self.tools.dump_tools(request))
        prompt = await self.processor.get_prompt_input(
            request.messages,
            do_preprocess=True,
            tools=request.tools,
            reasoning_effort=request.reasoning_effort,
            chat_template_kwargs=self.runner._chat_template_kwargs_from_request(request),
        )
        ids: list[int] = prompt["input_ids"]
        return ids


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Theirs:
    return Theirs(folder)


@pytest.mark.parametrize("body", REQUESTS.values(), ids=REQUESTS.keys())
async def test_tokens_of_a_chat_are_those_that_lmdeploy_computes(
    ours: ModelTokenizer, theirs: Theirs, body: dict[str, Any]
) -> None:
    prompt = canonical_chat(
        body["messages"],
        tools=body.get("tools"),
        tool_choice=body.get("tool_choice"),
        template_kwargs=body.get("chat_template_kwargs"),
        enable_thinking=body.get("enable_thinking"),
        reasoning_effort=body.get("reasoning_effort"),
    )
    assert isinstance(prompt, ChatPrompt)
    assert ours.encode(ours.render(prompt.messages, prompt.kwargs), salt="s") == token_bytes(await theirs.encode(body))


THEIR_TOOL = {"name": "f", "description": "does f", "input_schema": {"type": "object", "properties": {"a": {}}}}
MESSAGES: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [{"role": "user", "content": "hi"}]},
    "system as blocks": {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: none"},
            {"type": "text", "text": "be "},
            {"type": "text", "text": "brief"},
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    },
    "tools, thinking and results": {
        "system": "s",
        "tools": [THEIR_TOOL, {"name": "g", "input_schema": {}}],
        "messages": [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "..."},
                    {"type": "text", "text": "let me see"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "7"}]},
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
    },
    "one tool chosen": {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [THEIR_TOOL, {"name": "g", "input_schema": {}}],
        "tool_choice": {"type": "tool", "name": "g"},
    },
    "the assistant is continued": {
        "messages": [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, two"}]
    },
}


@pytest.mark.parametrize("body", MESSAGES.values(), ids=MESSAGES.keys())
async def test_tokens_of_anthropics_messages_are_those_that_lmdeploy_computes(
    ours: ModelTokenizer, theirs: Theirs, body: dict[str, Any]
) -> None:
    prompt = parse_call(Operation.MESSAGES, json.dumps({"model": "m", "max_tokens": 1, **body}).encode()).prompt
    assert isinstance(prompt, ChatPrompt)
    text = ours.render(prompt.messages, prompt.kwargs, inline_system=prompt.inline_system)
    assert ours.encode(text, salt="s") == token_bytes(await theirs.encode_messages(body))


FRONT_ONLY = (
    "{% if messages[0]['role'] == 'system' %}<|im_start|>system\n{{ messages[0]['content'] }}<|im_end|>\n{% endif %}"
    "{% for m in messages if m['role'] != 'system' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSING = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('a system message comes first') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
INLINE: dict[str, Any] = {
    "system": "first",
    "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": "y"}]},
        {"role": "system", "content": "second"},
        {"role": "user", "content": "z"},
        {"role": "system", "content": [{"type": "text", "text": "third"}, {"type": "image"}]},
    ],
}


@pytest.mark.parametrize("body", [INLINE, {"messages": INLINE["messages"]}], ids=["beside another", "alone"])
@pytest.mark.parametrize("template", [TEMPLATE, FRONT_ONLY, REFUSING], ids=["in place", "left out", "refused"])
async def test_inline_system_messages_go_where_lmdeploy_has_them_with_this_template(
    tmp_path: Path, template: str, body: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    folder = build_tiny(tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    ours, theirs = load_tokenizer(folder), Theirs(folder)
    prompt = parse_call(Operation.MESSAGES, json.dumps({"model": "m", "max_tokens": 1, **body}).encode()).prompt
    assert isinstance(prompt, ChatPrompt)
    text = ours.render(prompt.messages, prompt.kwargs, inline_system=prompt.inline_system)
    assert all(said in text for said in ("second", "third"))
    assert ours.encode(text, salt="s") == token_bytes(await theirs.encode_messages(body))


RESPONSES: dict[str, dict[str, Any]] = {
    "a text": {"input": "hi"},
    "instructions and developer": {
        "instructions": "be brief",
        "input": [
            {"role": "developer", "content": "and kind"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            {"role": "user", "content": "d"},
        ],
    },
    "calls and their outputs": {
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}],
        "input": [
            {"role": "user", "content": "x"},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "7"},
        ],
    },
    "tools that are not to be used": {
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "tool_choice": "none",
        "input": "x",
    },
    "one tool chosen": {
        "tools": [{"type": "function", "name": each, "parameters": {}} for each in "fg"],
        "tool_choice": {"type": "function", "name": "g"},
        "input": "x",
    },
}


@pytest.mark.parametrize("body", RESPONSES.values(), ids=RESPONSES.keys())
async def test_tokens_of_responses_are_those_that_lmdeploy_computes(
    ours: ModelTokenizer, theirs: Theirs, body: dict[str, Any]
) -> None:
    prompt = parse_call(Operation.RESPONSES, json.dumps({"model": "m", **body}).encode()).prompt
    assert isinstance(prompt, ChatPrompt)
    rendered = ours.encode(ours.render(prompt.messages, prompt.kwargs), salt="s")
    assert rendered == token_bytes(await theirs.encode_responses(body))
