"""A real LMDeploy engine inside the test's own process, so that its scheduler can be looked at."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

ANSWER_WITHIN_S = 240.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen; the default is greedy."""

    new_tokens: int = 24
    top_k: int = 1
    temperature: float = 1.0
    seed: int | None = None


GREEDY = Sampling()


class EngineThread:
    """A thread with an event loop for one engine.

    LMDeploy awaits inside ``torch.inference_mode()``: its tasks leave it in another order than they entered it, so
    that it stays on. The mode belongs to a thread: an engine on the test's thread would leave it on for later tests.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="local-engine")
        self._runner = asyncio.Runner()
        self._kept: asyncio.AbstractEventLoop | None = None

    def keep_running(self) -> None:
        """Let the loop run between calls of ``run``, too, until ``close``: an engine that others talk to."""
        self._kept = self.get_loop()
        self._pool.submit(self._kept.run_forever)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the thread."""
        return self._pool.submit(function).result()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread's loop, to its end."""
        if self._kept is not None:
            return asyncio.run_coroutine_threadsafe(work, self._kept).result()
        return self.call(lambda: self._runner.run(work))

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the thread's loop."""
        return self.call(self._runner.get_loop)

    def close(self) -> None:
        """Close the loop and end the thread."""
        if self._kept is not None:
            self._kept.call_soon_threadsafe(self._kept.stop)
        self.call(self._runner.close)
        self._pool.shutdown()


@dataclass(slots=True)
class LocalEngine:
    """An engine and the thread that it lives on; ``with`` closes both."""

    engine: Any
    runner: EngineThread
    preempted: list[int] = field(default_factory=list)
    _sessions: Any = field(default_factory=lambda: count(1))

    @classmethod
    def start(cls, model: Path, **config: Any) -> Self:
        from lmdeploy.messages import PytorchEngineConfig
        from lmdeploy.pytorch.engine.engine import Engine

        settings = {"device_type": "cpu", "block_size": 16, "num_gpu_blocks": 128, "session_len": 1024, **config}
        runner = EngineThread()
        try:
            engine = runner.call(
                lambda: Engine.from_pretrained(str(model), engine_config=PytorchEngineConfig(**settings))
            )
        except BaseException:
            runner.close()
            raise
        local = cls(engine, runner)
        local._watch_preemption()
        return local

    def _watch_preemption(self) -> None:
        scheduler = self.engine.scheduler
        original = scheduler.preempt_seqs

        def preempt_seqs(seqs: Any) -> None:
            seqs = tuple(seqs)
            self.preempted.extend(seq.seq_id for seq in seqs)
            original(seqs)

        scheduler.preempt_seqs = preempt_seqs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        async def close() -> None:
            self.engine.close()
            await asyncio.sleep(0.05)  # cancelled tasks get their turn

        self.runner.run(close())
        self.runner.close()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling = GREEDY) -> list[list[int]]:
        """Run all prompts at once and return the new tokens of each."""
        return self.generate_each([(prompt, sampling) for prompt in prompts])

    def generate_each(self, requests: Sequence[tuple[Sequence[int], Sampling]]) -> list[list[int]]:
        async def run() -> list[list[int]]:
            self.engine.start_loop()
            async with asyncio.timeout(ANSWER_WITHIN_S):
                return await asyncio.gather(*(self._one(prompt, sampling) for prompt, sampling in requests))

        return self.runner.run(run())

    async def _one(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
        from lmdeploy.messages import GenerationConfig, ResponseType

        config = GenerationConfig(
            max_new_tokens=sampling.new_tokens,
            top_k=sampling.top_k,
            top_p=1.0,
            temperature=sampling.temperature,
            random_seed=sampling.seed,
            ignore_eos=True,
        )
        tokens: list[int] = []
        session = next(self._sessions)
        async for output in self.engine.create_instance().async_stream_infer(session, list(prompt), gen_config=config):
            assert output.status in {ResponseType.SUCCESS, ResponseType.FINISH}, output.status
            tokens.extend(output.token_ids)
        return tokens

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that came out of the prefix cache so far."""
        return int(self.engine.scheduler.block_trie.stats.num_hit_tokens)
