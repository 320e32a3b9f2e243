"""Every route beyond plain chat with the official SDKs, against ``kvgate up --tiny``: LMDeploy's own answers."""

import uuid
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from tests.support.processes import Running, eventually

if TYPE_CHECKING:
    import anthropic

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
]

MODEL = "tiny-llama"
LIMIT_S = 120.0
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture
def url(stack: tuple[Running, str]) -> str:
    return stack[1]


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="sk-any", max_retries=0, timeout=LIMIT_S)


@pytest.fixture
def claude(url: str) -> "anthropic.Anthropic":
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key="sk-any", max_retries=0, timeout=LIMIT_S)


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def fresh(words: int = 60) -> str:
    return f"{uuid.uuid4()} " + "the gateway knows who holds what " * (words // 6)


def post(url: str, path: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.post(url + path, json=body, headers=named, trust_env=False, timeout=LIMIT_S)


def test_messages_whole_and_streamed_say_the_same(claude: "anthropic.Anthropic") -> None:
    messages = [user(fresh())]
    asked: Any = {"model": MODEL, "messages": messages, "max_tokens": 12, "system": "be brief"}
    greedy = {"temperature": 0}  # this library has no argument for it any more
    whole = claude.messages.create(**asked, extra_body=greedy)
    assert whole.role == "assistant"
    assert whole.stop_reason in {"max_tokens", "end_turn"}
    assert whole.usage.input_tokens > 60
    with claude.messages.stream(**asked, extra_body=greedy) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text  # type: ignore[union-attr]
    assert last.usage.output_tokens == whole.usage.output_tokens


def test_tokens_of_messages_are_counted(claude: "anthropic.Anthropic") -> None:
    few = claude.messages.count_tokens(model=MODEL, messages=[user("hi")]).input_tokens
    many = claude.messages.count_tokens(model=MODEL, messages=[user("hi " * 50)]).input_tokens
    assert 0 < few < many


def test_errors_of_messages_are_the_librarys_own(claude: "anthropic.Anthropic", url: str) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="claude-none", messages=[user("hi")], max_tokens=4)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError) as bad:
        claude.messages.create(model=MODEL, messages=[user("hi")], max_tokens=4, extra_body={"temperature": 5})
    assert bad.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    without_version = post(url, "/v1/messages", {"model": MODEL, "messages": [user("hi")], "max_tokens": 4})
    assert without_version.status_code == 400
    assert without_version.json()["type"] == "error"


def test_a_prompt_of_messages_or_responses_goes_where_it_is_cached(
    claude: "anthropic.Anthropic", client: openai.OpenAI
) -> None:
    text = fresh()

    def messages() -> Any:
        return claude.messages.with_raw_response.create(model=MODEL, messages=[user(text)], max_tokens=4).headers

    def responses() -> Any:
        return client.responses.with_raw_response.create(model=MODEL, input=text, max_output_tokens=4).headers

    first = messages()
    assert first["x-kvgate-matched-tokens"] == "0"
    eventually(lambda: messages()["x-kvgate-matched-tokens"] != "0", LIMIT_S, "the gateway learns of the blocks")
    again, other = messages(), responses()
    assert again["x-kvgate-instance"] == other["x-kvgate-instance"] == first["x-kvgate-instance"]
    assert again["x-kvgate-matched-tokens"] == other["x-kvgate-matched-tokens"], "one user message is one prompt"
    assert again["x-kvgate-route"].startswith("prefix;")


def test_responses_whole_and_streamed_say_the_same(client: openai.OpenAI) -> None:
    text = fresh()
    whole = client.responses.create(model=MODEL, input=text, max_output_tokens=12, temperature=0)
    assert whole.usage is not None
    assert whole.usage.output_tokens <= 12
    with client.responses.stream(model=MODEL, input=text, max_output_tokens=12, temperature=0) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in {"response.completed", "response.incomplete"}
    deltas = [
        event.delta
        for event in client.responses.create(model=MODEL, input=text, max_output_tokens=12, temperature=0, stream=True)
        if event.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == whole.output_text


def test_what_responses_can_not_do_is_said(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert error.value.param == "previous_response_id"
    assert isinstance(error.value.code, str)


def test_lmdeploy_has_no_embeddings_and_the_answer_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Unsupported"):
        client.embeddings.create(model=MODEL, input="x", encoding_format="float")


def test_generate_streams_and_answers_without_a_model(url: str) -> None:
    body = {"prompt": fresh(), "max_tokens": 6, "temperature": 0}
    whole = post(url, "/generate", body)
    assert whole.status_code == 200
    assert whole.json()["meta_info"]["completion_tokens"] <= 6
    streamed = post(url, "/generate", {**body, "stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert post(url, "/generate", {"input_ids": [5, 6, 7], "max_tokens": 2}).status_code == 200


def test_tokenize_gives_the_tokens_that_the_engine_counts(client: openai.OpenAI, url: str) -> None:
    messages = [user(fresh())]
    said = post(url, "/tokenize", {"model": MODEL, "messages": messages}).json()
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert answer.usage is not None
    assert said["count"] == len(said["tokens"]) == answer.usage.prompt_tokens
    assert said["max_model_len"] > 0
    tokens = post(url, "/tokenize", {"prompt": "héllo wörld", "return_token_strs": True}).json()
    assert len(tokens["token_strs"]) == tokens["count"]
    assert "héllo wörld" in post(url, "/detokenize", {"tokens": tokens["tokens"]}).json()["prompt"]
    assert post(url, "/detokenize", {"tokens": [1 << 40]}).status_code == 400
    assert post(url, "/tokenize", {"model": "none", "prompt": "x"}).status_code == 404


def test_several_answers_and_several_prompts(client: openai.OpenAI) -> None:
    two = client.chat.completions.create(model=MODEL, messages=[user("hi")], n=2, max_tokens=4)
    assert sorted(choice.index for choice in two.choices) == [0, 1]
    batch = client.completions.create(model=MODEL, prompt=["one", "two", "three"], max_tokens=3, temperature=0)
    assert sorted(choice.index for choice in batch.choices) == [0, 1, 2]
    pairs = client.completions.create(model=MODEL, prompt=["one", "two"], n=2, max_tokens=3)
    assert [choice.index for choice in pairs.choices] == [0, 1, 2, 3]
    alone = client.completions.create(model=MODEL, prompt=[5, 12, 7], max_tokens=3, temperature=0)
    both = client.completions.create(model=MODEL, prompt=[[5, 12, 7], [9]], max_tokens=3, temperature=0)
    assert (len(alone.choices), alone.usage and alone.usage.prompt_tokens) == (1, 3)
    assert both.choices[0].text == alone.choices[0].text


@pytest.mark.parametrize(("prompt", "n"), [(["one", "two", "three"], 1), ("one", 2), (["one", "two"], 2)])
def test_each_choice_of_a_streamed_completion_has_its_index(
    client: openai.OpenAI, prompt: str | list[str], n: int
) -> None:
    whole = client.completions.create(model=MODEL, prompt=prompt, n=n, max_tokens=3, temperature=0)
    texts = dict.fromkeys(range(len(whole.choices)), "")
    reasons: dict[int, str | None] = {}
    for event in client.completions.create(model=MODEL, prompt=prompt, n=n, max_tokens=3, temperature=0, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}


def test_seed_stop_and_response_format_reach_the_engine(client: openai.OpenAI) -> None:
    def sampled(seed: int) -> str:
        answer = client.chat.completions.create(
            model=MODEL, messages=[user("tell me")], max_tokens=12, temperature=1.0, seed=seed
        )
        return (answer.choices[0].message.content or "")[:8]

    assert sampled(7) == sampled(7) != sampled(8)
    made = client.chat.completions.create(
        model=MODEL,
        messages=[user("is it?")],
        max_tokens=40,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    )
    assert (made.choices[0].message.content or "").lstrip().startswith("{")
    whole = client.completions.create(model=MODEL, prompt="stop here", max_tokens=8, temperature=0).choices[0].text
    assert whole
    last = " " + whole.rsplit(" ", 1)[1]  # LMDeploy stops at whole tokens, not within one
    cut = client.completions.create(model=MODEL, prompt="stop here", max_tokens=8, temperature=0, stop=last)
    assert len(cut.choices[0].text) < len(whole)


IMAGE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LONG = "word " * 40_000


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 2}, "logprobs"),
        (TEXT, {"prompt": "x", "logprobs": 2}, "logprobs"),
        (CHAT, {"n": 0}, "n 0 must be"),
        (CHAT, {"temperature": 9}, "temperature"),
        (CHAT, {"max_tokens": -1}, "max_tokens"),
        (CHAT, {"response_format": {"type": "nope"}}, "response_format"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "z"}}}},
            "z",
        ),
        (CHAT, {"logit_bias": {"99999999": 1}}, "logit_bias"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]},
            "Multi",
        ),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "context length"),
        (TEXT, {"prompt": [1 << 40]}, ""),
    ],
    ids=lambda value: value if isinstance(value, str) and not value.startswith("/") else None,
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_can_not_do_is_a_400_in_the_apis_shape(
    url: str, path: str, body: dict[str, Any], said: str, *, stream: bool
) -> None:
    answer = post(url, path, {"model": MODEL, "messages": [user("hi")], "max_tokens": 4, "stream": stream, **body})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"


def test_an_image_or_a_tool_that_messages_can_not_take_is_the_librarys_own_error(claude: "anthropic.Anthropic") -> None:
    import anthropic

    image: Any = {"type": "base64", "media_type": "image/png", "data": IMAGE.partition(",")[2]}
    shown: Any = {"role": "user", "content": [{"type": "image", "source": image}]}
    with pytest.raises(anthropic.BadRequestError, match="Multimodal"):
        claude.messages.create(model=MODEL, messages=[shown], max_tokens=4)
    tool: Any = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
    with pytest.raises(anthropic.BadRequestError, match="tool-call-parser"):
        claude.messages.create(model=MODEL, messages=[user("hi")], max_tokens=4, tools=[tool])


def test_several_answers_are_streamed_side_by_side(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(model=MODEL, messages=[user("hi")], n=2, max_tokens=4, stream=True)
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


def test_tools_are_passed_on_and_an_engine_without_a_parser_says_so(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(openai.BadRequestError, match="tool-call-parser") as error:
        client.chat.completions.create(model=MODEL, messages=[user("hi")], tools=[tool], max_tokens=4)
    assert error.value.body is not None
