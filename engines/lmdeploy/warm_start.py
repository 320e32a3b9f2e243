"""A start that is warm: what the first requests would compile is compiled before an instance is ready.

LMDeploy's own warm-up runs the model's forward alone. The first requests compile the rest: logits and sampling, how
prompts fill the KV pool, reads of cached history, kernels for wide page tables and for more than one request, the masks
of structured output, log-probabilities. So real prompts go through the engine's loop before its process answers the
api_server, which waits for that: ``/health`` and ``readyz`` come later.

They leave no trace, as a scheduler of their own plans them: its prefix cache, queue, timeline and policies are dropped
with it, and it has no connector to the tiers. What they wrote to the KV pool lies in blocks that are free. The events,
counters and quotas of the engine's agent never hear of them, nor does the api_server.

A warm-up that fails is logged, and the instance starts cold.
"""

import asyncio
import itertools
import logging
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from engines.lmdeploy.settings import EngineSettings

_WARM_UP: Final = "kvgate_warm_up_s"
_ANSWER_TOKENS: Final = 4
_LOGPROBS: Final = 5
_SCHEMA: Final = {"type": "object", "properties": {"ready": {"type": "boolean"}}, "required": ["ready"]}
_TOGETHER: Final = (2, 5)
"""Requests that run at once: kernels are compiled for two, and for a batch size that none of their strides divides."""
_log = logging.getLogger("lmdeploy.kvgate")


class WarmUpError(RuntimeError):
    """A prompt of the warm-up was not answered; the message says which and how it ended."""


class How(StrEnum):
    """How a prompt of the warm-up is answered."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    STRUCTURED = "structured"
    LOGPROBS = "logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Prompts that run at once: the tokens of each, and how it is answered."""

    name: str
    prompts: tuple[tuple[list[int], How], ...]


def waves(
    *,
    block_tokens: int,
    chunk_tokens: int,
    most_tokens: int,
    most_at_once: int,
    vocab_tokens: int,
) -> list[Wave]:
    """Return the prompts of a warm-up in order; ``chunk_tokens`` is the most that one prefill computes.

    No prompt has more than ``most_tokens``. The tokens are random, the same at every start.
    """
    chooser = random.Random(1)  # noqa: S311 - reproducible, not secret

    def tokens(count: int) -> list[int]:
        return [chooser.randrange(vocab_tokens) for _ in range(max(1, min(count, most_tokens)))]

    short = tokens(block_tokens + 1)
    long = tokens(2 * chunk_tokens + block_tokens + 1)
    found = [
        Wave(name="a short prompt", prompts=((short, How.GREEDY),)),
        Wave(name="the same, sampled", prompts=((short, How.SAMPLED),)),
        Wave(name="two chunks and a rest", prompts=((long, How.GREEDY),)),
        Wave(
            name="most of it cached", prompts=((long[: -block_tokens // 2] + tokens(block_tokens // 2), How.SAMPLED),)
        ),
    ]
    for count in _TOGETHER:
        if count <= most_at_once:
            lengths = (block_tokens * (each + 1) + 1 for each in range(count))
            hows = itertools.cycle((How.GREEDY, How.SAMPLED))
            several = tuple((tokens(length), how) for length, how in zip(lengths, hows, strict=False))
            found.append(Wave(name=f"{count} requests at once", prompts=several))
    found.append(Wave(name="structured output", prompts=((short, How.STRUCTURED),)))
    return found


async def warm(engine: Any, say: Callable[[str], None]) -> float | None:
    """Send an ``Engine``, whose loop doesn't run yet, a warm-up's prompts, and return how many seconds they took.

    None where that can't be done, and where it failed; ``say`` gets the reason and the progress.
    """
    reason = _cold_because(engine)
    if reason is not None:
        say(f"no warm-up: {reason}")
        return None
    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(EngineSettings.load().warm_up_limit_s):
            await _warm(engine, _waves_of(engine), say)
    except Exception as error:  # noqa: BLE001 - whatever it is, requests may yet be answered
        _log.exception("the warm-up failed")
        say(f"the warm-up failed ({type(error).__name__}: {error}); first requests will be slow")
        return None
    took_s = time.perf_counter() - began_s
    say(f"warm after {took_s:.1f} s")
    return took_s


def warm_up_s_of(engine: Any) -> float | None:
    """Return how long an engine's warm-up took, None where there was none."""
    took_s: float | None = getattr(engine, _WARM_UP, None)
    return took_s


def _cold_because(engine: Any) -> str | None:
    if EngineSettings.load().warm_up_limit_s == 0:
        return "KVGATE_ENGINE_WARM_UP_LIMIT_S is 0"
    if getattr(engine.executor, "model_agent", None) is None or engine.dist_config.dp > 1:
        return "the model runs in other processes"
    if engine.req_manager.is_request_blocked(_types().ADD_MESSAGE):
        return "the engine starts without weights"
    return None


def _waves_of(engine: Any) -> list[Wave]:
    cache = engine.cache_config
    block_tokens = int(cache.block_size)
    on_gpu = engine.engine_config.device_type == "cuda"  # nothing is compiled for long prompts elsewhere
    planned = waves(
        block_tokens=block_tokens,
        chunk_tokens=int(cache.max_prefill_token_num) if on_gpu else 2 * block_tokens,
        most_tokens=int(engine.max_session_len) - _ANSWER_TOKENS - 1,
        most_at_once=int(cache.max_batches),
        vocab_tokens=int(engine.model_config.vocab_size),
    )
    if engine.engine_config.logprobs_mode is not None:
        (short, _), *_ = planned[0].prompts
        planned.append(Wave(name="log-probabilities", prompts=((short, How.LOGPROBS),)))
    return planned


async def _warm(engine: Any, planned: list[Wave], say: Callable[[str], None]) -> None:
    """Run waves on a scheduler and a loop of their own, and leave the engine as it was."""
    from lmdeploy.pytorch.paging import Scheduler

    kept = engine.scheduler, engine.req_manager
    engine.scheduler = Scheduler(engine.scheduler_config, engine.cache_config, seq_meta=engine.seq_meta)
    engine.req_manager = engine._bind_request_manager()  # noqa: SLF001
    try:
        await _through_all(engine, planned, say)
    finally:
        engine.executor.model_agent.reset_runtime_state()
        engine.scheduler, engine.req_manager = kept


async def _through_all(engine: Any, planned: list[Wave], say: Callable[[str], None]) -> None:
    loop = _EngineLoop(engine)
    try:
        for number, wave in enumerate(planned, 1):
            began_s = time.perf_counter()
            await loop.unless_it_ends(_answers(engine.req_manager, wave))
            took_s = time.perf_counter() - began_s
            say(f"warm-up {number} of {len(planned)}, {wave.name}: {took_s:.2f} s")
        await loop.drained()
    finally:
        await loop.end()


class _EngineLoop:
    """LMDeploy's ``EngineLoop`` over what an engine has now, running. The engine goes on after it."""

    def __init__(self, engine: Any) -> None:
        from lmdeploy.pytorch.engine.engine_loop import build_engine_loop

        self._engine = engine
        self._manager = engine.req_manager
        self._manager.set_main_loop_func(self._run)
        self._loop = build_engine_loop(engine)
        self._task: asyncio.Task[None] = self._manager.create_loop_task()
        self._gate: asyncio.Task[None] = self._manager._sender_wait_task  # noqa: SLF001

    async def _run(self) -> None:
        self._loop.start(asyncio.get_running_loop())
        await self._loop.wait_tasks()

    async def unless_it_ends(self, work: Awaitable[None]) -> None:
        """Wait for ``work``; raises what ended the loop where that ends first."""
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait((working, self._task), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await self._task
                raise WarmUpError("the engine's loop ended")
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        working.result()

    async def drained(self) -> None:
        """Wait until no step is on its way."""
        await self._loop.drain_for_sleep()

    async def end(self) -> None:
        """Stop, and wait until everything has stopped."""
        agent = self._engine.executor.model_agent
        steps = tuple(agent.tasks)
        self._loop.stop()
        self._manager.stop_loop()
        await asyncio.gather(self._task, self._gate, *self._loop.tasks, *steps, return_exceptions=True)


async def _answers(manager: Any, wave: Wave) -> None:
    """Wait for the answers to all prompts of a wave; raises ``WarmUpError``."""
    sender = manager.build_sender()
    async with asyncio.TaskGroup() as answers:
        for session_id, (tokens, how) in enumerate(wave.prompts):
            answers.create_task(_answer(sender, session_id, tokens, _sampling(how)))


async def _answer(sender: Any, session_id: int, tokens: list[int], sampling: Any) -> None:
    from lmdeploy.messages import ResponseType

    kinds = _types()
    sender.send_async(kinds.ADD_SESSION, {"session_id": session_id, "response": False})
    message = {
        "token_ids": tokens,
        "session_id": session_id,
        "sampling_param": sampling,
        "adapter_name": None,
        "input_multimodals": None,
        "migration_request": None,
        "with_cache": False,
        "preserve_cache": False,
    }
    answer = sender.send_async(kinds.ADD_MESSAGE, message)
    while (await sender.async_recv(answer)).type is ResponseType.SUCCESS:
        pass
    sender.send_async(kinds.END_SESSION, {"session_id": session_id, "response": False})
    if answer.type is not ResponseType.FINISH:
        raise WarmUpError(f"a prompt of {len(tokens)} tokens ended as {answer.type.name}")


def _sampling(how: How) -> Any:
    from lmdeploy.messages import GenerationConfig
    from lmdeploy.pytorch.messages import SamplingParam

    config = GenerationConfig(max_new_tokens=_ANSWER_TOKENS, ignore_eos=True, top_k=1)
    match how:
        case How.SAMPLED:
            config.do_sample, config.temperature, config.top_p, config.top_k = True, 0.7, 0.9, 0
        case How.STRUCTURED:
            config.response_format = {"type": "json_schema", "json_schema": {"name": "warm_up", "schema": _SCHEMA}}
        case How.LOGPROBS:
            config.logprobs = _LOGPROBS
    return SamplingParam.from_gen_config(config)


def _types() -> Any:
    from lmdeploy.pytorch.engine.request import RequestType

    return RequestType


def _say(line: str) -> None:
    print(f"kvgate engine: {line}", file=sys.stderr, flush=True)  # noqa: T201


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def engine_process_async(original: Any) -> Any:
    """``ZMQMPEngine._mp_proc_async``, in the engine process: warm before the api_server's first call is answered."""
    function = original.__func__

    async def _mp_proc_async(server: Any, engine: Any) -> None:
        setattr(engine, _WARM_UP, await warm(engine, _say))
        await function(server, engine)

    return staticmethod(_mp_proc_async)
