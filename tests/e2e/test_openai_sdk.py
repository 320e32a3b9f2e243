"""The official SDK against ``kvgate up --tiny``: what an application meets."""

import subprocess
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from kvgate.admin.client import AdminClient, find_key
from tests.support.processes import Running, eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MODEL = "tiny-llama"
LIMIT_S = 120.0


@pytest.fixture
def url(stack: tuple[Running, str]) -> str:
    return stack[1]


def sdk(url: str, key: str = "sk-any") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=LIMIT_S)


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return sdk(url)


class Answer:
    """A chat completion with what the gateway said about it."""

    def __init__(self, completion: ChatCompletion, headers: Any) -> None:
        self.completion = completion
        self.instance = headers["x-kvgate-instance"]
        self.matched = int(headers["x-kvgate-matched-tokens"])
        details = completion.usage.prompt_tokens_details if completion.usage else None
        self.cached = (details.cached_tokens or 0) if details else 0

    @property
    def text(self) -> str:
        return self.completion.choices[0].message.content or ""


def ask(client: openai.OpenAI, messages: Iterable[ChatCompletionMessageParam], max_tokens: int = 8) -> Answer:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=list(messages), max_tokens=max_tokens, temperature=0
    )
    return Answer(raw.parse(), raw.headers)


def user(text: str) -> ChatCompletionMessageParam:
    return {"role": "user", "content": text}


def fresh(words: int = 40) -> str:
    """A prompt of several blocks that no other test has sent."""
    return f"{uuid.uuid4()} " + "the gateway knows who holds what " * (words // 6)


def test_the_curl_that_kvgate_up_prints_works_as_it_is(stack: tuple[Running, str]) -> None:
    line = next(line for line in stack[0].said.splitlines() if "curl -s" in line)
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    answer = ChatCompletion.model_validate_json(done.stdout)
    assert "What is the capital of France?" in line
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_ready_means_that_every_engine_is_usable(stack: tuple[Running, str]) -> None:
    assert httpx2.get(f"{stack[1]}/readyz", trust_env=False).json()["usable"] == 2


def test_it_says_that_it_takes_any_key_on_loopback(stack: tuple[Running, str]) -> None:
    assert "listens on loopback only and accepts any key" in stack[0].said
    assert f"Dashboard  {stack[1]}/dashboard" in stack[0].said
    assert httpx2.get(f"{stack[1]}/dashboard", trust_env=False).status_code == 200


def test_chat(client: openai.OpenAI) -> None:
    answer = ask(client, [user("Hello")])
    assert answer.completion.object == "chat.completion"
    assert answer.completion.choices[0].finish_reason in {"length", "stop"}
    assert answer.completion.usage is not None
    assert answer.completion.usage.total_tokens == (
        answer.completion.usage.prompt_tokens + answer.completion.usage.completion_tokens
    )


def test_a_stream_says_the_same_as_the_whole_answer_and_ends_with_its_usage(client: openai.OpenAI) -> None:
    messages = [user(fresh())]
    whole = ask(client, messages, max_tokens=16)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.text
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.completion.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.completion.usage.completion_tokens


def test_text_completions(client: openai.OpenAI) -> None:
    completion = client.completions.create(model=MODEL, prompt="def main(", max_tokens=4, temperature=0)
    assert completion.usage is not None
    assert completion.usage.completion_tokens <= 4


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_an_unknown_model_is_a_404_with_its_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="gpt-99", messages=[user("Hello")])
    assert "gpt-99" in error.value.message


def test_a_body_that_is_no_request_is_a_400(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages="no list")  # type: ignore[arg-type]
    answer = httpx2.post(f"{url}/v1/chat/completions", content=b"{", trust_env=False)
    assert answer.status_code == 400
    assert {"message", "type"} <= answer.json()["error"].keys()


def test_the_second_time_a_prompt_is_cached_where_it_was_sent_first(client: openai.OpenAI) -> None:
    messages = [user(fresh())]
    first = ask(client, messages)
    assert (first.matched, first.cached) == (0, 0)
    second = ask(client, messages)
    eventually(lambda: ask(client, messages).matched > 0, LIMIT_S, "the gateway learns of the blocks")
    third = ask(client, messages)
    assert {second.instance, third.instance} == {first.instance}
    assert third.matched == third.cached > 0
    assert third.text == first.text, "cached or computed, the answer is the same"


def test_a_second_turn_goes_where_the_first_was_and_finds_all_of_it(client: openai.OpenAI) -> None:
    turns = [user(fresh())]
    first = ask(client, turns, max_tokens=40)
    eventually(lambda: ask(client, turns).matched > 0, LIMIT_S, "the gateway learns of the blocks")
    turns += [{"role": "assistant", "content": first.text}, user("Go on")]
    second = ask(client, turns)
    assert second.instance == first.instance
    assert second.cached > 0
    assert second.matched == second.cached


@contextmanager
def others_drained(url: str, kept: str, state: Path) -> Iterator[None]:
    """Give new prompts to ``kept`` alone, as an operator would: the other instances are drained."""
    admin = AdminClient(url, find_key(None, state))
    others = [each["id"] for each in admin.call("GET", "/instances").body["data"] if each["id"] != kept]
    assert others, "with one instance alone nothing is proven"
    try:
        for name in others:
            admin.call("POST", f"/instances/{name}/drain")
        yield
    finally:
        for name in others:
            admin.call("POST", f"/instances/{name}/resume")


def test_two_api_keys_share_no_kv_even_on_the_same_instance(url: str, environment: dict[str, str]) -> None:
    alice, bob = sdk(url, "sk-alice"), sdk(url, "sk-bob")
    messages = [user(fresh())]
    first = ask(alice, messages)
    eventually(lambda: ask(alice, messages).cached > 0, LIMIT_S, "alice's own prompt is cached for her")
    with others_drained(url, first.instance, Path(environment["KVGATE_STATE_DIR"])):
        other = ask(bob, messages)
    assert other.instance == first.instance
    assert (other.matched, other.cached) == (0, 0)
    assert other.text == first.text
    assert ask(alice, messages).cached > 0


def test_a_client_that_goes_away_ends_the_engines_work(client: openai.OpenAI, stack: tuple[Running, str]) -> None:
    with client.chat.completions.create(
        model=MODEL,
        messages=[user(fresh())],
        max_tokens=7000,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:
        next(iter(stream))
        eventually(lambda: running_requests(stack[0]) == 1, LIMIT_S, "the request runs")
    eventually(lambda: running_requests(stack[0]) == 0, LIMIT_S, "nothing runs any more")
    assert generated_tokens(stack[0]) < 7000, "it was cancelled, it didn't come to its end"


def engine_urls(up: Running) -> list[str]:
    return [line.split()[1] for line in up.said.splitlines() if line.startswith("engine-") and "http://" in line]


def running_requests(up: Running) -> int:
    return sum(
        httpx2.get(f"{url}/kv/v1/stats", trust_env=False, timeout=LIMIT_S).json()["load"]["running"]
        for url in engine_urls(up)
    )


def generated_tokens(up: Running) -> float:
    total = 0.0
    for url in engine_urls(up):
        for line in httpx2.get(
            f"{url}/metrics", trust_env=False, timeout=LIMIT_S, follow_redirects=True
        ).text.splitlines():
            if line.startswith("lmdeploy:generation_tokens_total"):
                total += float(line.rpartition(" ")[2])
    return total
