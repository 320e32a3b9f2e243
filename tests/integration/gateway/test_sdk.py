"""OpenAI's own client library against the gateway."""

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from tests.support.fleet import Fleet, running_fleet, script
from tests.support.scripted_engine import MODEL


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path) as running:
        yield running


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=fleet.gateway.url + "/v1", api_key="sk-any", max_retries=0) as made:
        yield made


async def test_chat_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}]
    whole = await client.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
    assert whole.choices[0].message.content == "tok0tok1tok2tok3"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 7
    stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)  # type: ignore[arg-type]
    chunks = [chunk async for chunk in stream]  # type: ignore[union-attr]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "tok0tok1tok2tok3"
    assert all(chunk.usage is None for chunk in chunks)
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},  # type: ignore[arg-type]
    )
    last = [chunk async for chunk in stream][-1]  # type: ignore[union-attr]
    assert last.usage.completion_tokens == 4
    assert last.choices == []


async def test_completions_and_models(client: openai.AsyncOpenAI) -> None:
    done = await client.completions.create(model=MODEL, prompt=[1, 2, 3])
    assert done.choices[0].text == "tok0tok1tok2tok3"
    assert [model.id async for model in client.models.list()] == [MODEL]


async def test_errors_are_the_librarys_own_classes(client: openai.AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}]

    async def chat(model: str = MODEL, **how: object) -> None:
        headers = {"x-script": script(**how)} if how else {}
        await client.chat.completions.create(model=model, messages=messages, extra_headers=headers)  # type: ignore[arg-type]

    with pytest.raises(openai.NotFoundError) as missing:
        await chat(model="none")
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        await chat(status=400)
    assert bad.value.type == "engine_said"
    with pytest.raises(openai.RateLimitError):
        await chat(status=429)
    with pytest.raises(openai.InternalServerError):
        await chat(status=500)


async def test_a_stream_that_dies_raises_in_the_library(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        extra_headers={"x-script": script(die_after=2)},
    )
    with pytest.raises(openai.APIError, match="ended within its answer"):
        async for _ in stream:
            pass


async def test_a_wrong_key_is_an_authentication_error(tmp_path: Path) -> None:
    keys = [{"key": "sk-right", "tenant": "t"}]
    async with (
        running_fleet(tmp_path, api_keys=keys) as fleet,
        openai.AsyncOpenAI(base_url=fleet.gateway.url + "/v1", api_key="sk-wrong", max_retries=0) as client,
    ):
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
