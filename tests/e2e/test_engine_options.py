"""What LMDeploy does only when it is started for it, through the gateway with the official SDKs: tool calls, logprobs.

The model's weights are random; a call that is required is written by guided decoding all the same.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import openai
import pytest

from kvgate.host.ports import free_ports
from tests.support.processes import running

if TYPE_CHECKING:
    import anthropic

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "tiny-llama"
LIMIT_S = 120.0
QUESTION: Any = [{"role": "user", "content": "what is the weather?"}]
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def url(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("options")
    engine, gateway = free_ports(2)
    model = environment["KVGATE_CACHE_DIR"] + "/tiny-llama"
    settings = {
        "KVGATE_PORT": str(gateway),
        "KVGATE_INSTANCES": f'[{{"id": "engine-0", "url": "http://127.0.0.1:{engine}"}}]',
        "KVGATE_TOKENIZER": model,
        "KVGATE_STATE_DIR": str(folder / "state"),
    }
    options = ["--logprobs-mode", "raw_logprobs", "--tool-call-parser", "qwen3"]
    arguments = ["engine", "--model", model, "--port", str(engine), "--kv-blocks", "512", "--", *options]
    with ExitStack() as stack:
        stack.enter_context(running(arguments, folder / "engine.log", environment))
        front = stack.enter_context(running(["gateway"], folder / "gateway.log", environment | settings))
        front.until_healthy(f"http://127.0.0.1:{gateway}/readyz")
        yield f"http://127.0.0.1:{gateway}"


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="sk-any", max_retries=0, timeout=LIMIT_S)


@pytest.fixture
def claude(url: str) -> "anthropic.Anthropic":
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key="sk-any", max_retries=0, timeout=LIMIT_S)


def test_a_tool_is_called_and_its_result_taken_in(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "tools": [TOOL], "max_tokens": 80, "temperature": 0}
    answer = client.chat.completions.create(**asked, messages=QUESTION, tool_choice="required").choices[0].message
    assert answer.tool_calls is not None
    call = answer.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "weather"
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    said: Any = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    after = client.chat.completions.create(**asked, messages=[*QUESTION, said, result], tool_choice="none")
    assert after.choices[0].finish_reason in {"stop", "length"}
    free = client.chat.completions.create(**asked, messages=QUESTION, tool_choice="auto")
    assert free.choices[0].finish_reason in {"stop", "length", "tool_calls"}


def test_a_tool_call_is_streamed(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[TOOL], tool_choice="required", max_tokens=80, temperature=0, stream=True
    )
    calls = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    assert calls[0].function is not None
    assert calls[0].function.name == "weather"


def test_messages_call_tools_too(claude: "anthropic.Anthropic") -> None:
    tool: Any = {"name": "weather", "description": "d", "input_schema": PARAMETERS}
    answer = claude.messages.create(
        model=MODEL, messages=QUESTION, max_tokens=80, tools=[tool], tool_choice={"type": "any"}
    )
    assert [each.name for each in answer.content if each.type == "tool_use"][:1] == ["weather"]


def test_logprobs_come_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 4, "temperature": 0}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert len(whole.content) == 4
    assert all(each.logprob <= 0 and each.top_logprobs for each in whole.content)
    chunks = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, stream=True)
    streamed = [
        each.token
        for chunk in chunks
        if chunk.choices and chunk.choices[0].logprobs is not None
        for each in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == [each.token for each in whole.content]
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        client.chat.completions.create(**asked, logprobs=True, top_logprobs=99)
