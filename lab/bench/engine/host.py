"""What a request costs the host of an LMDeploy instance: as LMDeploy does it, and as kvgate's hooks do.

Four things that all streams wait for are timed, each with LMDeploy's own code and with what takes its place:

- How long a chat of ``prompt_tokens`` holds the api_server's event loop while it is rendered and tokenized: its first
  request, and one more turn on it. A task that is due every millisecond sees how late it is.
- How long ``/v1/encode`` of a text of as many tokens holds it.
- An answer's text after such a prompt: its first token, and each of the rest.
- How long after a step the last of ``streams`` senders in the engine process has its token, one step right after the
  other.

No model is computed. What is timed is wall time on this machine: other work on it adds to all figures.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

_WORDS: Final = (__doc__ or "").split()
_SALT: Final = "tenant"
_TICK_S: Final = 0.001
_MEMORY_BYTES: Final = 64 << 20
_MESSAGE_WORDS: Final = 700

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """``folder`` is a model's with a tokenizer and a chat template; the median of ``repeats`` is reported."""

    folder: Path
    prompt_tokens: int = 60_000
    answer_tokens: int = 400
    streams: int = 16
    steps: int = 100
    repeats: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure, as LMDeploy does it and as kvgate does; ``unit`` is of both."""

    name: str
    unit: str
    stock: float
    ours: float


def measure(plan: HostPlan, say: Callable[[str], None]) -> list[Figure]:
    """Return all figures; raises what LMDeploy raises for a folder that it can't use."""
    from lmdeploy.model import get_chat_template
    from lmdeploy.serve.processors.multimodal import MultimodalProcessor
    from lmdeploy.tokenizer import Tokenizer

    processor = MultimodalProcessor(Tokenizer(str(plan.folder)), get_chat_template(str(plan.folder), None))
    figures = []
    say("prompts on the api_server's event loop")
    figures += asyncio.run(_prompts(processor, plan))
    say("a text that is encoded alone")
    figures.append(asyncio.run(_encoded(processor, plan)))
    say("tokens to text")
    figures += _texts(processor.tokenizer, plan)
    say("tokens of a step to their streams")
    figures.append(asyncio.run(_streams(plan)))
    return figures


async def _prompts(processor: Any, plan: HostPlan) -> list[Figure]:
    from engines.lmdeploy.http.prompts import Prompts

    original = type(processor)._get_text_prompt_input  # noqa: SLF001
    prompts = Prompts(processor.tokenizer, memory_bytes=_MEMORY_BYTES)

    def stock(chat: Messages) -> Awaitable[Any]:
        result: Awaitable[Any] = original(processor, chat, do_preprocess=True, adapter_name=None)
        return result

    def ours(chat: Messages) -> Awaitable[Any]:
        return prompts.make(
            processor, lambda like: original(like, chat, do_preprocess=True, adapter_name=None), salt=_SALT
        )

    await ours([{"role": "user", "content": "hello"}])  # how to encode is found out at start
    holds: dict[str, list[tuple[float, float]]] = {}
    chooser = random.Random(1)  # noqa: S311 - reproducible, not secret
    try:
        for _ in range(plan.repeats):
            chat = _chat(processor, plan.prompt_tokens, chooser)
            more = [*chat, *_chat(processor, 1, chooser)]
            for name, make, asked in (
                ("stock", stock, chat),
                ("ours", ours, chat),
                ("stock turn", stock, more),
                ("ours turn", ours, more),
            ):
                holds.setdefault(name, []).append(await _hold(lambda: make(asked)))  # noqa: B023 - called at once
    finally:
        prompts.close()
    held, took = (
        {name: statistics.median(each[part] for each in seen) * 1e3 for name, seen in holds.items()} for part in (0, 1)
    )
    return [
        Figure(name="loop_hold_first_request", unit="ms", stock=held["stock"], ours=held["ours"]),
        Figure(name="loop_hold_later_turn", unit="ms", stock=held["stock turn"], ours=held["ours turn"]),
        Figure(name="tokenize_first_request", unit="ms", stock=took["stock"], ours=took["ours"]),
        Figure(name="tokenize_later_turn", unit="ms", stock=took["stock turn"], ours=took["ours turn"]),
    ]


async def _encoded(processor: Any, plan: HostPlan) -> Figure:
    """How long LMDeploy's ``/v1/encode`` and ours hold the loop; the answer's JSON is not in LMDeploy's figure."""
    from fastapi import APIRouter
    from fastapi.routing import APIRoute
    from lmdeploy.serve.openai.endpoints import auxiliary
    from lmdeploy.serve.openai.protocol import EncodeRequest

    from engines.lmdeploy.http.prompts import processor_init, prompts_of
    from engines.lmdeploy.http.token_routes import auxiliary_register

    like = object.__new__(type(processor))
    processor_init(type(processor).__init__)(like, processor.tokenizer, processor.chat_template)
    engine = SimpleNamespace(
        tokenizer=processor.tokenizer,
        chat_template=processor.chat_template,
        prompt_processor=like,
        backend_config=None,  # no limits: stock LMDeploy has none
    )
    chooser = random.Random(3)  # noqa: S311
    words = plan.prompt_tokens * _MESSAGE_WORDS // len(processor.tokenizer.encode(_text(chooser, _MESSAGE_WORDS)))
    held: dict[str, float] = {}
    try:
        for name, register in (
            ("stock", auxiliary.register),
            ("ours", auxiliary_register(auxiliary.register)),
        ):
            router = APIRouter()
            register(router, SimpleNamespace(async_engine=engine))
            routes = {route.path: route.endpoint for route in router.routes if isinstance(route, APIRoute)}
            encode = routes["/v1/encode"]
            seen = []
            for _ in range(plan.repeats):
                asked = EncodeRequest(input=_text(chooser, words))
                raw = _posted(asked.model_dump_json().encode())
                took_s = (await _hold(lambda: encode(request=asked, raw_request=raw)))[0]  # noqa: B023 - called at once
                seen.append(took_s)
            held[name] = statistics.median(seen) * 1e3
    finally:
        prompts_of(like).close()
    return Figure(name="loop_hold_encode", unit="ms", stock=held["stock"], ours=held["ours"])


def _posted(body: bytes) -> Any:
    """Return the request with this body, as FastAPI hands it to a handler beside the parsed one."""
    from fastapi import Request

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "method": "POST", "path": "/v1/encode", "headers": []}, receive)


async def _hold(work: Callable[[], Awaitable[Any]]) -> tuple[float, float]:
    """Return the longest that the event loop was held while ``work`` was done, and how long it took; seconds."""
    longest_s, done = 0.0, False

    async def watch() -> None:
        nonlocal longest_s
        while not done:
            before_s = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            longest_s = max(longest_s, time.perf_counter() - before_s - _TICK_S)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    began_s = time.perf_counter()
    await work()
    took_s = time.perf_counter() - began_s
    done = True
    await watching
    return longest_s, took_s


def _texts(tokenizer: Any, plan: HostPlan) -> list[Figure]:
    from engines.lmdeploy.http.detokenize import detokenize_incrementally

    chooser = random.Random(2)  # noqa: S311
    encode = tokenizer.model.model.encode
    prompt = encode(_text(chooser, plan.prompt_tokens), add_special_tokens=False)[: plan.prompt_tokens]
    answer = encode(_text(chooser, 2 * plan.answer_tokens), add_special_tokens=False)[: plan.answer_tokens]
    stock = type(tokenizer.model).detokenize_incrementally
    first, rest = {}, {}
    for name, detokenize in (("stock", stock), ("ours", detokenize_incrementally(stock))):
        runs = [_text_times(detokenize, tokenizer.model, prompt, answer) for _ in range(plan.repeats)]
        first[name] = statistics.median(run[0] for run in runs) * 1e3
        rest[name] = statistics.median(statistics.median(run[1:]) for run in runs) * 1e6
    return [
        Figure(name="first_text", unit="ms", stock=first["stock"], ours=first["ours"]),
        Figure(name="text_of_a_token", unit="us", stock=rest["stock"], ours=rest["ours"]),
    ]


def _text_times(detokenize: Any, model: Any, prompt: list[int], answer: list[int]) -> list[float]:
    from lmdeploy.tokenizer import DetokenizeState

    ids, state, taken = list(prompt), DetokenizeState(len(prompt)), []
    for token_id in answer:
        ids.append(token_id)
        began_s = time.perf_counter()
        _, state = detokenize(model, ids, state)
        taken.append(time.perf_counter() - began_s)
    return taken


async def _streams(plan: HostPlan) -> Figure:
    """The median over steps of when the last stream has its token."""
    from lmdeploy.pytorch.engine.request import RequestSender

    from engines.lmdeploy.schedule.handles import sender_async_recv

    stock = RequestSender.async_recv
    return Figure(
        name="last_of_streams",
        unit="ms",
        stock=await _last_of_streams(stock, plan) * 1e3,
        ours=await _last_of_streams(sender_async_recv(stock), plan) * 1e3,
    )


async def _last_of_streams(receive: Any, plan: HostPlan) -> float:
    from lmdeploy.messages import ResponseType
    from lmdeploy.pytorch.engine.request import RequestManager, Response

    async def main_loop() -> None:
        await asyncio.Event().wait()

    manager = RequestManager()
    manager.set_main_loop_func(main_loop)
    tasks = [manager.create_loop_task(), manager._sender_wait_task]  # noqa: SLF001
    sender = manager.build_sender()
    answers = [Response(type=ResponseType.SUCCESS, sender_id=0, event=asyncio.Event()) for _ in range(plan.streams)]
    sent_s = 0.0
    lags: list[float] = []

    async def stream(answer: Any) -> None:
        while True:
            await receive(sender, answer, wait_main=True)
            lags.append(time.perf_counter() - sent_s)

    streams = [asyncio.create_task(stream(answer)) for answer in answers]
    lasts = []
    try:
        for _ in range(plan.steps):
            lags.clear()
            sent_s = time.perf_counter()
            for answer in answers:
                manager.response(answer)
            while len(lags) < len(answers):  # noqa: ASYNC110 - nothing is added to what is timed
                await asyncio.sleep(0)
            lasts.append(max(lags))
    finally:
        for task in streams:
            task.cancel()
        manager.stop_loop()
        await asyncio.gather(*streams, *tasks, return_exceptions=True)
    return statistics.median(lasts)


def _chat(processor: Any, tokens: int, chooser: random.Random) -> Messages:
    """A chat of messages of about a thousand tokens, of so many tokens in all."""
    encode = processor.tokenizer.model.model.encode
    messages: Messages = []
    have = 0
    while have < tokens:
        content = _text(chooser, _MESSAGE_WORDS)
        have += len(encode(content, add_special_tokens=False))
        messages.append({"role": "assistant" if len(messages) % 2 else "user", "content": content})
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": "Go on."})
    return messages


def _text(chooser: random.Random, words: int) -> str:
    return " ".join(chooser.choice(_WORDS) for _ in range(words))
