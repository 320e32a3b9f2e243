"""A simulated instance over HTTP, alone and behind the real gateway."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from engines.models.tiny import build_tiny
from engines.sim.faults import Faults
from engines.sim.text import SimTokenizer
from kvcontrol.core.blocks import CacheTier
from tests.support.running_gateway import eventually
from tests.support.simulated_instance import simulated, simulated_fleet

SYSTEM = "You answer in short words. " * 20
QUICK = 0.02


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> SimTokenizer:
    return SimTokenizer(model)


def chat(*texts: str, **more: object) -> dict[str, Any]:
    roles = ("system", "user", "assistant")
    order = [roles[0], *(roles[1 + place % 2] for place in range(len(texts) - 1))]
    messages = [{"role": role, "content": text} for role, text in zip(order, texts, strict=True)]
    return {"model": "m", "messages": messages, **more}


async def test_whole_and_streamed_answers_say_the_same(tokenizer: SimTokenizer) -> None:
    async with simulated(tokenizer) as engine, aiohttp.ClientSession(engine.url) as session:
        async with session.post("/v1/chat/completions", json=chat(SYSTEM, "hello", max_tokens=9)) as answer:
            whole = await answer.json()
        asked = chat(SYSTEM, "hello", max_tokens=9, stream=True, stream_options={"include_usage": True})
        async with session.post("/v1/chat/completions", json=asked) as answer:
            lines = [line.decode()[6:].strip() async for line in answer.content if line.startswith(b"data: ")]
    events = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    text = "".join(each["choices"][0]["delta"]["content"] for each in events[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    assert len(events) == 11
    assert events[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    first, second = whole["usage"], events[-1]["usage"]
    assert first["completion_tokens"] == second["completion_tokens"] == 9
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == (first["prompt_tokens"] - 1) // 16 * 16


async def test_each_answer_of_a_streamed_completion_has_its_index(tokenizer: SimTokenizer) -> None:
    asked = {"model": "m", "prompt": ["hello", "there"], "n": 2, "max_tokens": 3}
    async with simulated(tokenizer) as engine, aiohttp.ClientSession(engine.url) as session:
        async with session.post("/v1/completions", json=asked) as answer:
            whole = [choice["text"] for choice in (await answer.json())["choices"]]
        async with session.post("/v1/completions", json=asked | {"stream": True}) as answer:
            lines = [line.decode()[6:].strip() async for line in answer.content if line.startswith(b"data: ")]
    told = [""] * 4
    for line in lines[:-1]:
        [choice] = json.loads(line)["choices"]
        told[choice["index"]] += choice["text"]
    assert told == whole


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", b"{", 400, "invalid body"),
        ("/v1/completions", b'{"model": "m", "prompt": []}', 400, "prompt"),
        ("/v1/completions", b'{"model": "m", "prompt": "a", "max_tokens": 0}', 400, "must be at least 1, got 0"),
        (
            "/v1/completions",
            json.dumps({"model": "m", "prompt": [1] * 16384}).encode(),
            400,
            "model context length (16384",
        ),
        ("/v1/completions", b'{"model": "m", "prompt": ["a", 1]}', 400, "preprocessing failed"),
        ("/v1/completions", b'{"model": "m", "prompt": [-1], "max_tokens": 1}', 400, "token"),
        ("/v1/completions", b'{"model": "m", "prompt": [[1], 2]}', 400, "preprocessing failed"),
        ("/v1/completions", b'{"model": "m", "prompt": "a", "n": 129}', 400, "at most 128 are allowed"),
        ("/v1/completions", b'{"model": "m", "prompt": ["a", "b"], "n": 65}', 400, "at most 128 are allowed"),
        ("/v1/completions", json.dumps({"model": "m", "prompt": ["a"] * 9999}).encode(), 400, "at most 128"),
        ("/v1/completions", b'{"model": "other", "prompt": "a"}', 404, "there is 'm'"),
        ("/v1/completions", b'{"model": "m", "prompt": "a", "logprobs": 2}', 400, "not enabled logprobs_mode"),
        ("/v1/chat/completions", b'{"model": "m", "messages": [{}], "logprobs": true}', 400, "Logprobs(True)"),
        ("/generate", b'{"prompt": "a", "return_logprob": true}', 400, "not enabled logprobs_mode"),
        (
            "/v1/chat/completions",
            b'{"model": "m", "messages": [{}], "n": 2, "session_id": 7}',
            400,
            "explicit session_id",
        ),
        (
            "/v1/chat/completions",
            b'{"model": "m", "messages": [{}], "max_tokens": 0}',
            400,
            "must be a positive integer",
        ),
        ("/generate", b'{"prompt": "a", "max_tokens": -1}', 400, "must be non-negative"),
        ("/generate", b'{"prompt": "a", "input_ids": [1]}', 400, "exactly one of prompt or input_ids"),
        ("/v1/messages", b'{"model": "m", "messages": [], "max_tokens": 1}', 400, "header: anthropic-version"),
        ("/v1/messages/count_tokens", b'{"model": "m", "messages": []}', 400, "invalid body"),
        ("/v1/responses", b'{"model": "m", "input": "a", "background": true}', 400, "background mode"),
        ("/v1/responses", b'{"model": "m", "input": [{"type": "odd"}]}', 400, "input item type: 'odd'"),
        ("/v1/responses", b'{"model": "m", "input": [{"role": []}]}', 400, "message role at index 0: []"),
        ("/v1/chat/completions", b'{"model": "m", "messages": [{"role": "user", "content": 3}]}', 400, "content"),
        ("/v1/chat/completions", b'{"model": "m", "messages": [{"role": "user"}], "temperature": "a"}', 400, "float"),
        ("/kv/v1/prefixes/pin", b'{"hashes": []}', 400, "1 to 10000 names of blocks"),
        ("/kv/v1/prefixes/unpin", b'{"hash": "zz"}', 400, "hash: 'zz' is no name of a block"),
        ("/kv/v1/migrate", b'{"hashes": ["zz"], "tier": "DDR"}', 400, "no tiers below HBM"),
    ],
)
async def test_what_can_not_be_done_is_said(
    tokenizer: SimTokenizer, path: str, body: bytes, status: int, words: str
) -> None:
    async with (
        simulated(tokenizer) as engine,
        aiohttp.ClientSession(engine.url) as session,
        session.post(path, data=body) as answer,
    ):
        assert answer.status == status
        said = await answer.json()
        assert words in said.get("error", said)["message"]
        assert ("error" in said) is path.startswith(("/kv/v1", "/v1/messages", "/v1/responses"))


async def test_messages_through_anthropics_own_library(tokenizer: SimTokenizer) -> None:
    import anthropic

    asked: Any = {"model": "m", "system": SYSTEM, "messages": [{"role": "user", "content": "hello"}]}
    async with (
        simulated(tokenizer) as engine,
        anthropic.AsyncAnthropic(base_url=engine.url, api_key="any", max_retries=0) as client,
    ):
        whole = await client.messages.create(**asked, max_tokens=9)
        assert (whole.role, whole.stop_reason, whole.usage.output_tokens) == ("assistant", "max_tokens", 9)
        async with client.messages.stream(**asked, max_tokens=9) as stream:
            kinds = [event.type async for event in stream if event.type != "text"]
            last = await stream.get_final_message()
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[2:] == 9 * ["content_block_delta"] + ["content_block_stop", "message_delta", "message_stop"]
        assert [(last.content[0].text, last.stop_reason, last.usage.output_tokens)] == [  # type: ignore[union-attr]
            (whole.content[0].text, "max_tokens", 9)  # type: ignore[union-attr]
        ]
        assert (await client.messages.count_tokens(**asked)).input_tokens == whole.usage.input_tokens
        ids = list(tokenizer.encode("hello"))
        raw: Any = {"messages": [], "extra_body": {"input_ids": ids, "return_token_ids": True}}
        short = await client.messages.create(model="m", max_tokens=3, **raw)
        assert short.usage.input_tokens == len(ids)
        assert len(short.output_ids) == 3  # type: ignore[attr-defined]
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(**{**asked, "model": "other"}, max_tokens=9)
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
        with pytest.raises(anthropic.BadRequestError, match="reads text alone"):
            await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": [image]}])  # type: ignore[list-item,typeddict-item]


async def test_responses_and_chat_through_openais_own_library(tokenizer: SimTokenizer) -> None:
    async with (
        simulated(tokenizer) as engine,
        openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="any", max_retries=0) as client,
    ):
        asked: Any = {"model": "m", "instructions": SYSTEM, "input": "hello"}
        whole = await client.responses.create(**asked, max_output_tokens=9)
        assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
        assert (whole.usage.output_tokens, whole.usage.input_tokens_details.cached_tokens) == (9, 0)  # type: ignore[union-attr]
        events = [event async for event in await client.responses.create(**asked, max_output_tokens=9, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert (len(deltas), "".join(deltas)) == (9, whole.output_text)
        assert events[-1].response.usage == whole.usage
        async with client.responses.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            last = await stream.get_final_response()
        assert (kinds[-1], last.status, last.usage.output_tokens) == ("response.completed", "completed", 8)  # type: ignore[union-attr]
        said = await client.chat.completions.create(**chat(SYSTEM, "hello", max_tokens=9))
        assert said.choices[0].message.content == whole.output_text
        assert said.usage.prompt_tokens == whole.usage.input_tokens  # type: ignore[union-attr]
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.create(**{**asked, "model": "other"})
        assert (missing.value.param, missing.value.type) == ("model", "not_found_error")
        with pytest.raises(openai.BadRequestError, match="not enabled logprobs_mode"):
            await client.chat.completions.create(**chat(SYSTEM, "hello", logprobs=True))


async def test_generate_whole_and_streamed_say_the_same(tokenizer: SimTokenizer) -> None:
    async with simulated(tokenizer) as engine, aiohttp.ClientSession(engine.url) as session:
        async with session.post("/generate", json={"prompt": SYSTEM, "max_tokens": 5}) as answer:
            whole = await answer.json()
        asked = {"input_ids": tokenizer.encode(SYSTEM), "max_tokens": 5, "stream": True}
        async with session.post("/generate", json=asked) as answer:
            lines = [line.decode()[6:].strip() async for line in answer.content if line.startswith(b"data: ")]
        async with session.post("/generate", json={"prompt": "hello"}) as answer:
            usual = (await answer.json())["meta_info"]
    events = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    assert "".join(each["text"] for each in events) == whole["text"]
    assert [token for each in events for token in each["output_ids"]] == whole["output_ids"]
    assert [each["meta_info"]["completion_tokens"] for each in events] == [1, 2, 3, 4, 5, 5]
    assert [each["meta_info"]["finish_reason"] for each in events[:-1]] == 5 * [None]
    assert events[-1]["meta_info"] == whole["meta_info"]
    assert (usual["completion_tokens"], usual["finish_reason"]) == (128, {"type": "length"})


async def test_a_stop_token_ends_the_engines_work(tokenizer: SimTokenizer) -> None:
    async with simulated(tokenizer) as engine, aiohttp.ClientSession(engine.url) as session:
        core = engine.instance.engine

        async def generated(**more: object) -> tuple[dict[str, Any], int]:
            before = core.counters.generated_tokens
            async with session.post("/generate", json={"prompt": SYSTEM, "max_tokens": 2000, **more}) as answer:
                return await answer.json(), core.counters.generated_tokens - before

        whole, tokens = await generated()
        assert tokens == len(whole["output_ids"]) == 2000
        busy_s = core.counters.busy_s
        rare = next(
            each
            for place, each in enumerate(whole["output_ids"])
            if each not in whole["output_ids"][:place] and place > 20
        )
        cut, tokens = await generated(stop_token_ids=[rare])
        assert cut["output_ids"] == whole["output_ids"][: whole["output_ids"].index(rare)]
        assert tokens == len(cut["output_ids"]) + 1
        assert core.counters.busy_s - busy_s < busy_s / 4
        assert core.pool.used_blocks == len(core.pool.cached)
        for stop, most in (([rare], 2000), (tokenizer.words[:-1], 40)):
            never, tokens = await generated(stop_token_ids=stop, ignore_eos=True, max_tokens=most)
            assert tokens == len(never["output_ids"]) == most
            assert not set(never["output_ids"]) & set(stop)
        async with session.post(
            "/generate", json={"prompt": "a", "stop_token_ids": tokenizer.words, "ignore_eos": True}
        ) as answer:
            assert (answer.status, "none could be generated" in (await answer.json())["message"]) == (400, True)


async def test_prompts_of_a_completion_have_n_answers_each_and_a_list_of_ids_is_one_prompt(
    tokenizer: SimTokenizer,
) -> None:
    ids = tokenizer.encode("hello")
    async with simulated(tokenizer) as engine, aiohttp.ClientSession(engine.url) as session:

        async def asked(prompt: Any, n: int = 1) -> list[str]:
            body = {"model": "m", "prompt": prompt, "n": n, "max_tokens": 5}
            async with session.post("/v1/completions", json=body) as answer:
                said = await answer.json()
            assert [choice["index"] for choice in said["choices"]] == list(range(len(said["choices"])))
            return [choice["text"] for choice in said["choices"]]

        [alone] = await asked("hello")
        assert await asked(ids) == await asked([ids]) == [alone]
        two = await asked("hello", 2)
        assert len(two) == len(set(two)) == 2
        assert await asked(["hello", "hello"], 2) == two * 2
        assert await asked([ids, ids]) == [alone, alone]


async def test_a_choice_that_breaks_off_breaks_the_stream_off(tokenizer: SimTokenizer) -> None:
    async with simulated(tokenizer, faults=Faults(slow=QUICK, die=1.0)) as engine:
        async with aiohttp.ClientSession(engine.url) as session:
            with pytest.raises(aiohttp.ClientError):
                async with session.post(
                    "/v1/chat/completions", json=chat(SYSTEM, "hello", n=3, max_tokens=30, stream=True)
                ) as answer:
                    await answer.content.read()
        await eventually(lambda: not engine.instance.engine.running and not engine.instance.engine.waiting)


async def test_policies_and_quotas_are_changed_and_the_cache_is_reset(tokenizer: SimTokenizer) -> None:
    shape = {"ddr_blocks": 256, "context_tokens": 8192}
    async with simulated(tokenizer, **shape) as engine, aiohttp.ClientSession(engine.url) as session:
        async with session.post("/v1/chat/completions", json=chat(SYSTEM, "hello")) as answer:
            assert answer.status == 200
        async with session.put("/kv/v1/policy", json={"kind": "eviction", "name": "s3fifo"}) as answer:
            assert [each["name"] for each in (await answer.json())["policies"]] == ["s3fifo", "lru", "", "priority"]
        for candidates, status in (("lru,mq(lifetime=2)", 200), ("lru,nothing", 400)):
            async with session.put("/kv/v1/policy", json={"kind": "shadow", "name": candidates}) as answer:
                assert answer.status == status
        async with session.post("/v1/chat/completions", json=chat(SYSTEM, "hello")) as answer:
            assert answer.status == 200
        async with session.get("/kv/v1/policy") as answer:
            shadow = (await answer.json())["policies"][-2]
            assert (shadow["name"], shadow["shadow"]["requests"]) == ("lru,mq(lifetime=2)", 1)
        async with session.put("/kv/v1/policy", json={"kind": "eviction:nvme", "name": "lru"}) as answer:
            assert answer.status == 400
        quota = {"tenant": "shared", "tier": "DDR", "quota": {"guaranteed_bytes": 10 * 917504}}
        async with session.put("/kv/v1/quotas", json=quota) as answer:
            said = (await answer.json())["tiers"]["DDR"]["shared"]
            assert said["quota"]["guaranteed_bytes"] == 10 * 917504
            assert said["used_bytes"] == said["used_blocks"] * 917504 > 0
        async with session.get("/kv/v1/blocks?limit=2&tier=DDR") as answer:
            listed = await answer.json()
            assert len(listed["blocks"]) == 2 < listed["total"]
        head = listed["blocks"][0]["hash"]
        async with session.post("/kv/v1/prefixes/pin", json={"hashes": [head], "ttl_s": 60}) as answer:
            pin = await answer.json()
            assert (pin["hash"], pin["missing"]) == (head, 0)
            assert pin["tiers"]["HBM"] == pin["tiers"]["DDR"] == pin["blocks"]
        async with session.get("/kv/v1/prefixes") as answer:
            assert (await answer.json())["limit_blocks"] == 64
        async with session.post("/kv/v1/prefixes/unpin", json={"hash": head}) as answer:
            assert await answer.json() == {"unpinned": True}
        async with session.post("/kv/v1/prefixes/pin", json={"hashes": [head]}) as answer:
            assert (await answer.json())["left_s"] is None
        async with session.post("/kv/v1/prefixes/invalidate", json={"hashes": [head]}) as answer:
            said = await answer.json()
            assert said["unpinned"] == [head]
            assert said["dropped"]["DDR"] >= 1
        listed["total"] -= said["dropped"]["DDR"]
        async with session.post("/kv/v1/prefix-cache/reset") as answer:
            dropped = (await answer.json())["dropped"]
            assert dropped["HBM"] >= dropped["DDR"] == listed["total"]
        async with session.get("/kv/v1/snapshot") as answer:
            assert not any((await answer.json())["tiers"].values())


async def test_an_important_request_is_started_before_earlier_ones(tokenizer: SimTokenizer) -> None:
    def asked(priority: str) -> dict[str, Any]:
        body = {"model": "m", "prompt": f"{priority} hello", "max_tokens": 9000, "stream": True}
        return {"json": body, "headers": {"x-kvgate-priority": priority, "x-kvgate-deadline-ms": "60000"}}

    async with (
        simulated(tokenizer, max_batch=1, context_tokens=10_000, faults=Faults(slow=5.0)) as engine,
        aiohttp.ClientSession(engine.url) as session,
    ):
        core = engine.instance.engine
        async with session.post("/v1/completions", **asked("urgent")) as refused:
            assert refused.status == 400
            assert "x-kvgate-priority is none of high, normal, low" in (await refused.json())["error"]["message"]
        running = await session.post("/v1/completions", **asked("normal"))
        await running.content.readany()
        waiting: list[asyncio.Task[aiohttp.ClientResponse]] = []
        for priority in ("low", "low", "high"):
            waiting.append(asyncio.create_task(session.post("/v1/completions", **asked(priority))))
            await eventually(lambda: core.waiting == len(waiting))
        async with session.get("/kv/v1/policy") as answer:
            schedule = (await answer.json())["policies"][-1]
            assert (schedule["kind"], schedule["name"], schedule["schedule"]["waiting"]) == ("schedule", "priority", 3)
        running.close()
        important = await waiting[-1]
        await important.content.readany()
        async with session.get("/kv/v1/policy") as answer:
            classes = (await answer.json())["policies"][-1]["schedule"]["classes"]
        assert {name: (each["waiting"], each["started"]) for name, each in classes.items()} == {
            "high": (0, 1),
            "normal": (0, 1),
            "low": (2, 0),
        }
        async with session.get("/metrics") as answer:
            assert 'kvgate_engine_waiting_requests{priority="low"} 2.0' in await answer.text()
        important.close()
        for each in waiting[:-1]:
            (await each).close()
        await eventually(lambda: not core.running and not core.waiting)


async def test_a_client_that_leaves_ends_its_request(tokenizer: SimTokenizer) -> None:
    async with simulated(tokenizer, faults=Faults(slow=1.0)) as engine:
        async with aiohttp.ClientSession(engine.url) as session:
            asked = {"model": "m", "prompt": "hello", "max_tokens": 9000, "stream": True}
            async with session.post("/v1/completions", json=asked) as answer:
                await answer.content.readany()
                assert engine.instance.engine.running == 1
        await eventually(lambda: not engine.instance.engine.running)
        assert engine.instance.engine.counters.cancelled == 1


async def test_the_gateway_knows_what_a_simulated_instance_holds(
    tokenizer: SimTokenizer, model: Path, tmp_path: Path
) -> None:
    quick = Faults(slow=QUICK)
    async with simulated_fleet(tokenizer, model, tmp_path, {"a": quick, "b": quick}) as (gateway, engines):
        turns = [SYSTEM, "hello"]
        holder = ""
        for turn in range(3):
            async with gateway.post("/v1/chat/completions", chat(*turns, max_tokens=40)) as answer:
                said = await answer.json()
                matched = int(answer.headers["x-kvgate-matched-tokens"])
                cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert matched == cached
                assert turn == 0 or (matched > 0 and answer.headers["x-kvgate-instance"] == holder)
                holder = answer.headers["x-kvgate-instance"]
            turns += [said["choices"][0]["message"]["content"], f"and {turn}?"]
            held = len((await engines[holder].instance.snapshot()).hashes(CacheTier.HBM))
            await gateway.counted(f'kvgate_resident_blocks{{instance="{holder}",tier="HBM"}}', held)
        system, *rest = chat(*turns[:-2])["messages"]
        version = {"anthropic_version": "2023-06-01"}
        for path, body in (
            ("/v1/messages", {"system": system["content"], "messages": rest, "max_tokens": 4}),
            ("/v1/responses", {"instructions": system["content"], "input": rest}),
        ):
            async with gateway.post(path, {"model": "m", **body}, **version) as answer:
                assert answer.status == 200
                assert int(answer.headers["x-kvgate-matched-tokens"]) >= matched > 0
                assert (await answer.json())["usage"]["input_tokens"] == said["usage"]["prompt_tokens"]


async def test_an_instance_that_refuses_is_covered_by_the_other(
    tokenizer: SimTokenizer, model: Path, tmp_path: Path
) -> None:
    faults = {"a": Faults(slow=QUICK, refuse=1.0), "b": Faults(slow=QUICK)}
    async with simulated_fleet(tokenizer, model, tmp_path, faults) as (gateway, _):
        for number in range(4):
            async with gateway.post("/v1/chat/completions", chat(f"{number} {SYSTEM}", "hello")) as answer:
                assert (answer.status, answer.headers["x-kvgate-instance"]) == (200, "b")


async def test_an_answer_that_breaks_off_ends_in_an_error_event(
    tokenizer: SimTokenizer, model: Path, tmp_path: Path
) -> None:
    async with simulated_fleet(tokenizer, model, tmp_path, {"a": Faults(slow=QUICK, die=1.0)}) as (gateway, _):
        said = b""
        for number in range(20):  # it may break off before the first token, which is a 502
            async with gateway.post(
                "/v1/chat/completions", chat(f"{number} {SYSTEM}", "hello", max_tokens=30, stream=True)
            ) as answer:
                said = await answer.content.read()
                if answer.status == 200:
                    break
            await asyncio.sleep(0.1)
        assert b'"code":"upstream_cut"' in said
