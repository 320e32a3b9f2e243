"""Quotas and the queue, seen by clients."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from engines.models.tiny import write_tokenizer
from gateway.state import Kind
from tests.support.databases import redis_server
from tests.support.fleet import CHAT, COMPLETIONS, Fleet, chat, instances, running_fleet, script
from tests.support.people import put
from tests.support.running_gateway import RunningGateway, eventually, running_gateway
from tests.support.scripted_engine import MODEL, ScriptedEngine
from tests.support.tokenized_fleet import tokenized_fleet

ACME = "Bearer acme-key"
OTHER = "Bearer other-key"
KEYS = [{"key": "acme-key", "tenant": "acme"}, {"key": "other-key", "tenant": "other"}]


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with redis_server() as server:
        yield f"redis://127.0.0.1:{server.port}/0"


async def statuses(gateways: list[RunningGateway], count: int, **body: Any) -> Counter[int]:
    async def one(number: int) -> int:
        gateway = gateways[number % len(gateways)]
        async with gateway.post(CHAT, chat(**body), authorization=ACME) as answer:
            await answer.read()
            return int(answer.status)

    return Counter(await asyncio.gather(*(one(number) for number in range(count))))


async def test_each_prompt_of_a_list_counts_as_a_request_and_too_many_are_refused_before_an_engine(
    tmp_path: Path,
) -> None:
    await put(tmp_path, Kind.QUOTA, "acme", requests_per_min=10)
    async with running_fleet(tmp_path, api_keys=KEYS, max_answers=8) as fleet:

        async def asked(prompt: Any, **more: Any) -> tuple[int, str | None]:
            body = {"model": MODEL, "prompt": prompt} | more
            async with fleet.gateway.post(COMPLETIONS, body, authorization=ACME) as answer:
                return answer.status, ((await answer.json()).get("error") or {}).get("code")

        assert await asked(["a", "b", "c", "d"]) == (200, None)
        assert await asked([[1], [2], [3], [4], [5]]) == (200, None)
        assert await asked([7] * 500) == (200, None)
        assert await asked("a") == (429, "rate_limit_exceeded")
        before = fleet.requests
        for prompt, more in ((["a"] * 9, {}), ([[1]] * 9, {}), ("a", {"n": 9}), (["a", "b"], {"best_of": 5})):
            assert await asked(prompt, **more) == (400, "too_many_answers")
        assert fleet.requests == before


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_a_tenant_without_requests_left_is_refused_before_its_long_body_is_read(
    tmp_path: Path, path: str
) -> None:
    await put(tmp_path, Kind.QUOTA, "acme", requests_per_min=1)
    async with tokenized_fleet(tmp_path, write_tokenizer(tmp_path / "model"), api_keys=KEYS) as fleet:
        gateway = fleet.gateway
        assert await _status(fleet, chat()) == 200
        async with gateway.post(path, b"{" + b" " * (1 << 20), authorization=ACME) as answer:
            assert answer.status == 429
        async with gateway.post(path, b"{" + b" " * (1 << 20), authorization=OTHER) as answer:
            assert answer.status == 400


async def test_a_text_far_beyond_the_context_is_not_tokenized(tmp_path: Path) -> None:
    async with tokenized_fleet(tmp_path, write_tokenizer(tmp_path / "model")) as fleet:
        for chars, status in ((32 * 8193, 400), (32 * 1024, 200)):
            text = "word " * (chars // 5 + 1)
            for body in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
                async with fleet.gateway.post("/tokenize", body) as answer:
                    assert answer.status == status
                    said = await answer.json()
                    assert status == 200 or said["error"]["code"] == "context_length_exceeded"


async def test_a_text_that_can_not_be_cut_is_not_tokenized(tmp_path: Path) -> None:
    async with tokenized_fleet(tmp_path, write_tokenizer(tmp_path / "model")) as fleet:
        for chars, status in ((250_000, 200), (262_145, 400)):
            async with fleet.gateway.post("/tokenize", {"prompt": "x" * chars}) as answer:
                assert answer.status == status
                said = await answer.json()
                assert status == 200 or "no place between words or lines" in said["error"]["message"]


async def test_bodies_of_one_tenant_leave_memory_to_the_others(tmp_path: Path) -> None:
    memory = {"max_body_bytes": 100_000, "body_memory_bytes": 1_600_000}
    async with running_fleet(tmp_path, api_keys=KEYS, **memory) as fleet:
        long = chat(messages=[{"role": "user", "content": "x" * 90_000}])

        async def status(key: str) -> tuple[int, str | None]:
            async with fleet.gateway.post(CHAT, long, authorization=key) as answer:
                return answer.status, ((await answer.json()).get("error") or {}).get("code")

        held = script(chunks=1000, chunk_s=0.05)
        async with AsyncExitStack() as streams:
            for _ in range(3):  # of each the body is kept twice, as it came and as it is sent
                asked = fleet.gateway.post(CHAT, long | {"stream": True}, authorization=ACME, x_script=held)
                stream = await streams.enter_async_context(asked)
                await stream.content.readany()
            assert await status(ACME) == (429, "saturated")
            assert await status(OTHER) == (200, None)

        async def again() -> bool:
            return await status(ACME) == (200, None)

        await eventually(again)


@pytest.mark.parametrize("replicas", [1, 3])
async def test_a_hundred_at_once_against_ten_a_minute_let_in_exactly_ten(
    tmp_path: Path, redis_url: str, replicas: int
) -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(ScriptedEngine().started())
        gateways = []
        for number in range(replicas):
            folder = tmp_path / str(number)
            await put(folder, Kind.QUOTA, "acme", requests_per_min=10)
            shared = {"redis_url": redis_url} if replicas > 1 else {}
            gateway = await stack.enter_async_context(
                running_gateway(folder, instances=instances({"a": engine}), api_keys=KEYS, **shared)
            )
            await gateway.usable(1)
            gateways.append(gateway)
        assert await statuses(gateways, 100) == {200: 10, 429: 90}
        assert len(engine.requests) == 10


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    await put(tmp_path, Kind.QUOTA, "acme", requests_per_min=5, tokens_per_min=1000, concurrency=2, context_tokens=600)
    await put(tmp_path, Kind.TENANT, "gone", suspended=True)
    async with running_fleet(tmp_path, api_keys=[*KEYS, {"key": "gone-key", "tenant": "gone"}]) as running:
        yield running


async def test_answers_say_what_is_left_and_tokens_are_settled_by_what_was_used(fleet: Fleet) -> None:
    left = []
    for _ in range(2):
        async with fleet.gateway.post(CHAT, chat(max_tokens=500), authorization=ACME) as answer:
            assert answer.status == 200
            used = (await answer.json())["usage"]["total_tokens"]
            left.append(int(answer.headers["x-ratelimit-remaining-tokens"]))
            assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
            assert answer.headers["x-ratelimit-limit-requests"] == "5"
            assert 0 < int(answer.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 61
    assert left[0] < 500
    assert left[0] - left[1] == used
    async with fleet.gateway.post(CHAT, chat(), authorization=OTHER) as answer:
        assert not [name for name in answer.headers if name.lower().startswith("x-ratelimit")]


async def test_a_used_up_quota_is_a_429_that_says_when(fleet: Fleet) -> None:
    async with asyncio.TaskGroup() as group:
        held = [group.create_task(_status(fleet, chat(max_tokens=5), x_script=script(ttft_s=1.0))) for _ in range(2)]
        await eventually(lambda: fleet.active == 2)
        async with fleet.gateway.post(CHAT, chat(), authorization=ACME) as answer:
            assert answer.status == 429
            error = (await answer.json())["error"]
            assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
            assert "at the same time" in error["message"]
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["x-ratelimit-remaining-requests"] == "3"
    assert [each.result() for each in held] == [200, 200]
    await fleet.gateway.counted('kvgate_shed_requests_total{reason="quota_concurrency"}', 1)
    await fleet.gateway.counted('kvgate_requests_total{operation="chat_completions",outcome="shed"}', 1)


async def _status(fleet: Fleet, body: dict[str, Any], **headers: str) -> int:
    async with fleet.gateway.post(CHAT, body, authorization=ACME, **headers) as answer:
        await answer.read()
        return int(answer.status)


@pytest.mark.parametrize("failure", [{"status": 500}, {"status": 503}, {"die_after": 0}, {"die_after": 1}])
async def test_what_an_engine_failed_costs_nothing(fleet: Fleet, failure: dict[str, Any]) -> None:
    for _ in range(7):
        assert await _status(fleet, chat(max_tokens=500), x_script=script(**failure)) >= 500
    async with fleet.gateway.post(CHAT, chat(), authorization=ACME) as answer:
        assert answer.headers["x-ratelimit-remaining-requests"] == "4"


async def test_a_bad_request_costs_a_request_and_no_tokens(fleet: Fleet) -> None:
    assert await _status(fleet, chat(max_tokens=500), x_script=script(status=400)) == 400
    async with fleet.gateway.post(CHAT, chat(max_tokens=1), authorization=ACME) as answer:
        assert answer.headers["x-ratelimit-remaining-requests"] == "3"
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) > 900


async def test_counting_by_the_gateways_own_tokenizer_costs_a_request_and_no_tokens(tmp_path: Path) -> None:
    await put(tmp_path, Kind.QUOTA, "acme", requests_per_min=3, tokens_per_min=10)
    model = write_tokenizer(tmp_path / "tiny-llama")
    async with tokenized_fleet(tmp_path, model, api_keys=KEYS) as fleet:
        answers = []
        for path, body in (
            ("/tokenize", {"prompt": "far more than ten tokens " * 20}),
            ("/detokenize", {"tokens": [5, 6]}),
            ("/tokenize", {"prompt": 5}),
            ("/tokenize", {"prompt": "x"}),
        ):
            async with fleet.gateway.post(path, body, authorization=ACME) as answer:
                assert answer.headers["x-request-id"]
                answers.append((answer.status, answer.headers["x-ratelimit-remaining-requests"]))
        assert answers == [(200, "2"), (200, "1"), (400, "0"), (429, "0")]
        assert fleet.requests == 0
        await fleet.gateway.counted('kvgate_requests_total{operation="tokenize",outcome="ok"}', 1)
        await fleet.gateway.counted('kvgate_requests_total{operation="tokenize",outcome="shed"}', 1)


async def test_what_no_quota_could_ever_let_in_is_a_400(fleet: Fleet) -> None:
    async with fleet.gateway.post(CHAT, chat(max_tokens=5000), authorization=ACME) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "context_length_exceeded")
    async with fleet.gateway.post(CHAT, chat(n=4), authorization=ACME) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "request_exceeds_quota")
    assert fleet.requests == 0


async def test_a_suspended_tenant_is_a_403_and_stored_changes_are_seen(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, api_keys=KEYS, store_poll_s=0.05) as fleet:
        assert await _status(fleet, chat()) == 200
        await put(tmp_path, Kind.TENANT, "acme", suspended=True)

        async def refused() -> bool:
            return await _status(fleet, chat()) == 403

        await eventually(refused)
        await put(tmp_path, Kind.TENANT, "acme", suspended=False)

        async def served() -> bool:
            return await _status(fleet, chat()) == 200

        await eventually(served)


async def test_beyond_what_instances_take_requests_wait_in_turn_and_more_are_shed(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    slow = script(ttft_s=0.4)
    async with running_fleet(tmp_path, {"a": engine}, api_keys=KEYS, max_instance_requests=1, queue_length=2) as fleet:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(_status(fleet, chat(), x_script=slow)) for _ in range(3)]
            await eventually(lambda: fleet.active == 1)

            async def two_wait() -> bool:
                return await fleet.gateway.metric("kvgate_requests_waiting") == 2

            await eventually(two_wait)
            async with fleet.gateway.post(CHAT, chat(), authorization=ACME) as answer:
                assert answer.status == 429
                assert (await answer.json())["error"]["code"] == "saturated"
                assert 1 <= int(answer.headers["retry-after"]) <= 60
            async with fleet.gateway.post(CHAT, chat(), authorization=OTHER) as answer:  # the longer line gives way
                assert answer.status == 200
        assert Counter(each.result() for each in running) == {200: 2, 429: 1}
        assert await fleet.gateway.metric("kvgate_requests_waiting") == 0


async def test_a_client_that_leaves_the_queue_leaves_at_once(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, {"a": ScriptedEngine()}, max_instance_requests=1) as fleet:
        first = asyncio.create_task(_status(fleet, chat(), x_script=script(ttft_s=1.5)))
        await eventually(lambda: fleet.active == 1)
        second = asyncio.create_task(_status(fleet, chat()))

        async def waits() -> bool:
            return await fleet.gateway.metric("kvgate_requests_waiting") == 1

        async def gone() -> bool:
            return await fleet.gateway.metric("kvgate_requests_waiting") == 0

        await eventually(waits)
        second.cancel()
        await eventually(gone)
        assert not first.done()
        assert await first == 200
        assert fleet.requests == 1


async def test_clients_that_leave_at_once_leave_nothing_behind_shared_quotas(tmp_path: Path, redis_url: str) -> None:
    """Their cancellation may come in the moment in which Redis answers."""
    await put(tmp_path, Kind.QUOTA, "acme", requests_per_min=1000)
    async with running_fleet(tmp_path, {"a": ScriptedEngine()}, api_keys=KEYS, redis_url=redis_url) as fleet:
        body = json.dumps(chat()).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: {ACME}\r\nx-script: {script(ttft_s=60)}\r\n"
        sent = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", int(fleet.gateway.url.rpartition(":")[2]))
            writer.write(sent)
            await writer.drain()
            writer.close()
        await fleet.gateway.counted('kvgate_requests_total{operation="chat_completions",outcome="cancelled"}', 20)
        await eventually(lambda: not fleet.active)


async def test_a_wait_beyond_its_class_is_a_429(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, {"a": ScriptedEngine()}, max_instance_requests=1, queue_standard_s=0.2) as fleet:
        first = asyncio.create_task(_status(fleet, chat(), x_script=script(ttft_s=2.0)))
        await eventually(lambda: fleet.active == 1)
        assert await _status(fleet, chat()) == 429
        await fleet.gateway.counted('kvgate_shed_requests_total{reason="deadline"}', 1)
        assert await first == 200


async def test_a_burst_is_all_served_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, max_instance_requests=3) as fleet:
        assert await statuses([fleet.gateway], 200) == {200: 200}
        assert await fleet.gateway.metric("kvgate_requests_waiting") == 0
        for name in ("a", "b"):
            assert await fleet.gateway.metric(f'kvgate_requests_in_flight{{instance="{name}"}}') == 0


async def test_quotas_that_can_not_be_checked_are_a_503_and_unlimited_tenants_go_on(tmp_path: Path) -> None:
    await put(tmp_path, Kind.QUOTA, "acme", requests_per_min=5)
    with redis_server() as server:
        async with running_fleet(tmp_path, api_keys=KEYS, redis_url=f"redis://127.0.0.1:{server.port}/0") as fleet:
            assert await _status(fleet, chat()) == 200
            server.kill()
            async with fleet.gateway.post(CHAT, chat(), authorization=ACME) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (503, "quotas_unavailable")
            async with fleet.gateway.post(CHAT, chat(), authorization=OTHER) as answer:
                assert answer.status == 200
            server.again()
            assert await _status(fleet, chat()) == 200


async def test_an_absurd_claim_does_not_blur_what_others_have_got(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, api_keys=KEYS) as fleet:
        assert await _status(fleet, chat(max_tokens=10**18, n=128)) == 200
        assert await statuses([fleet.gateway], 20) == {200: 20}


async def test_an_engine_is_told_the_tenants_class_and_what_is_left_of_its_wait(tmp_path: Path) -> None:
    await put(tmp_path, Kind.QUOTA, "acme", priority="high", slo="interactive")
    await put(tmp_path, Kind.QUOTA, "other", priority="low", slo="batch")
    async with running_fleet(
        tmp_path, {"a": ScriptedEngine()}, api_keys=KEYS, queue_interactive_s=7, queue_batch_s=900
    ) as fleet:
        told = []
        for key in (ACME, OTHER):
            async with fleet.gateway.post(CHAT, chat(), authorization=key) as answer:
                assert answer.status == 200
            sent = fleet.engines["a"].headers[-1]
            told.append((sent["x-kvgate-priority"], int(sent["x-kvgate-deadline-ms"])))
    assert [priority for priority, _ in told] == ["high", "low"]
    assert 0 <= told[0][1] <= 7000
    assert 7000 < told[1][1] <= 900_000


async def test_the_wait_at_the_gateway_is_taken_off_what_an_engine_is_told(tmp_path: Path) -> None:
    await put(tmp_path, Kind.QUOTA, "acme", slo="interactive")
    async with running_fleet(
        tmp_path, {"a": ScriptedEngine()}, api_keys=KEYS, max_instance_requests=1, queue_interactive_s=60
    ) as fleet:
        gateway = fleet.gateway
        slow = script(chunks=2, stall_after=1)
        async with gateway.post(CHAT, chat(stream=True), authorization=ACME, x_script=slow) as first:
            await first.content.readany()
            second = asyncio.create_task(statuses([gateway], 1))
            await gateway.counted("kvgate_requests_waiting", 1)
            await asyncio.sleep(0.5)
        assert await second == {200: 1}
        before, after = (int(each["x-kvgate-deadline-ms"]) for each in fleet.engines["a"].headers[-2:])
    assert after <= 60_000 - 500
    assert before <= 60_000
