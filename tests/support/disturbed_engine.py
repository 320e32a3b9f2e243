"""An engine that is interrupted while it answers, and what each of its requests may have got then."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.tiered_engine import TieredEngine


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended, by LMDeploy's name for it, and the tokens that came until then."""

    how: str
    tokens: list[int]


@dataclass(slots=True)
class DisturbedEngine(TieredEngine):
    """A ``TieredEngine``, with tiers or without, whose requests may end early."""

    running: set[int] = field(default_factory=set)
    """Sessions under way."""
    _got_tokens: int = 0
    _got_more: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def follow(
        self, prompt: Sequence[int], *, new_tokens: int, salt: str = "", carrying: Mapping[str, Any] | None = None
    ) -> Ended:
        """Ask greedily, and return how it ended; ``carrying`` are attributes that its headers would set."""
        from lmdeploy.messages import GenerationConfig

        config = GenerationConfig(max_new_tokens=new_tokens, top_k=1, temperature=1.0, ignore_eos=True)
        if salt:
            config.kvgate_cache_salt = salt
        for name, value in (carrying or {}).items():
            setattr(config, name, value)
        session, self._next_session = self._next_session, self._next_session + 1
        self.running.add(session)
        tokens: list[int] = []
        how = "nothing"
        instance = self.local.engine.create_instance()
        try:
            async for output in instance.async_stream_infer(session, list(prompt), gen_config=config):
                tokens.extend(output.token_ids)
                how = output.status.name
                async with self._got_more:
                    self._got_tokens += len(output.token_ids)
                    self._got_more.notify_all()
        finally:
            self.running.discard(session)
        return Ended(how, tokens)

    async def beside(
        self, asked: Sequence[tuple[Sequence[int], int]], operation: Callable[[], Awaitable[Any]], *, after: int
    ) -> list["asyncio.Task[Ended]"]:
        """Ask prompts for so many tokens each, all at once, and run the operation once ``after`` tokens have come."""
        goal = self._got_tokens + after
        tasks = [
            asyncio.create_task(self.follow(prompt, new_tokens=new_tokens, salt="tenant-a"))
            for prompt, new_tokens in asked
        ]
        async with self._got_more:
            await self._got_more.wait_for(lambda: self._got_tokens >= goal)
        await operation()
        return tasks

    async def sleep_and_wake(self) -> None:
        """As operators do it, the weights first."""
        engine = self.local.engine
        await engine.sleep(1)
        engine.wakeup(["weights"])
        engine.wakeup(["kv_cache"])

    async def update(self, request: Any) -> None:
        """Load weights, as the api_server has it done."""
        from lmdeploy.pytorch.engine.mp_engine.base_worker import EngineWorkerBase

        await EngineWorkerBase(self.local.engine).update_params(request)

    async def cancel_all(self) -> None:
        """Cancel every request under way."""
        engine = self.local.engine
        await asyncio.gather(*(engine.create_instance().async_cancel(session) for session in tuple(self.running)))

    async def is_alive(self) -> bool:
        """Whether all of the engine's loops run."""
        return bool(self.local.engine.get_local_health_status()["alive"])


__all__ = ["DisturbedEngine", "Ended"]
