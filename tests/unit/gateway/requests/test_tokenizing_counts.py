"""Tokenizing counts in the memory of bodies, however many requests tokenize and however they end."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from time import monotonic

import pytest

from engines.models.tiny import write_tokenizer
from gateway.admission.fair_threads import FairThreads
from gateway.errors import ApiError
from gateway.fingerprint import Fingerprinter, ModelTokenizer, load_tokenizer
from gateway.fingerprint.canonical import TextPrompt
from gateway.http.body_memory import SPELLING_TIMES, TOKENIZING_TIMES, BodyMemory
from gateway.registry import Registry
from gateway.registry.checks import CheckRules
from gateway.requests.tokens import TokenApi
from gateway.types import Operation, Tenant, TenantId

LIMIT_S = 60.0
OUTCOMES = (Operation.TOKENIZE, Operation.DETOKENIZE, "chat", "not json", "unknown model")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("models") / "tiny"))


def text_of(seed: int, words: int) -> str:
    choose = random.Random(seed)  # noqa: S311 - not for secrets
    return " ".join(str(choose.randrange(10**6)) for _ in range(words))


@pytest.mark.parametrize("seed", range(3))
async def test_what_tokenizing_takes_is_counted_and_given_back_however_requests_end(
    tokenizer: ModelTokenizer, seed: int
) -> None:
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    memory = BodyMemory(1 << 30, shed=print)
    registry = Registry([], rules=CheckRules(unhealthy_after=1))
    with FairThreads(3, memory=memory, bound=100, ageing_s=1e6, clock=monotonic) as threads:
        tokens = TokenApi(tokenizer=tokenizer, threads=threads, registry=registry)
        fingerprinter = Fingerprinter(tokenizer, threads)

        def request(number: int) -> tuple[Callable[[], Awaitable[object]], int]:
            who = Tenant(id=TenantId(f"t{number % 4}"), salt="s")
            text = text_of(100 * seed + number, words=chance.choice([5_000, 30_000]))
            match chance.choice(OUTCOMES):
                case "chat":
                    call = lambda: fingerprinter.fingerprint(  # noqa: E731
                        TextPrompt(text=text), size_bytes=len(text), model="m", tenant=who
                    )
                    return call, TOKENIZING_TIMES * len(text)
                case "not json":
                    body, operation = text.encode(), Operation.TOKENIZE
                case "unknown model":
                    body, operation = json.dumps({"prompt": text, "model": "none"}).encode(), Operation.TOKENIZE
                case Operation.DETOKENIZE:
                    body, operation = json.dumps({"tokens": [7] * 9000}).encode(), Operation.DETOKENIZE
                case _:
                    body, operation = json.dumps({"prompt": text}).encode(), Operation.TOKENIZE
            return lambda: tokens.answer(operation, body, who), SPELLING_TIMES * len(body)

        asked = [request(number) for number in range(40)]
        tasks = [asyncio.ensure_future(call()) for call, _ in asked]
        largest = sorted(size for _, size in asked)[-3:]
        seen = set()
        async with asyncio.timeout(LIMIT_S):
            while not all(task.done() for task in tasks) or memory.held_bytes:
                seen.add(memory.held_bytes)
                if chance.random() < 0.02:
                    chance.choice(tasks).cancel()
                await asyncio.sleep(0)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [each for each in ended if isinstance(each, Exception) and not isinstance(each, ApiError)]
    assert min(size for _, size in asked) <= max(seen) <= sum(largest)
    assert not memory._held
