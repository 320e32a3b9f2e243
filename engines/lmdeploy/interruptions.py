"""Operations that interrupt an engine's steps, and what becomes of its blocks: sleep, wake, other weights.

LMDeploy 0.18 keeps its block trie over all of them, although the blocks' bytes are gone or stale. Here none of a block
is left after them that isn't true any more, also where they fail half-way; and each has the engine to itself.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from engines.control.calls import EngineBusyError
from engines.lmdeploy.agent import EngineAgent, agent_of
from engines.lmdeploy.pauses import compute_anew

_WEIGHTS_ARE_LOST = 2
"""The level of sleep after which the weights have to be loaded again, by whoever wakes the engine."""

_log = logging.getLogger("lmdeploy.kvgate")


def _agent(engine: Any) -> EngineAgent:
    agent = agent_of(engine)
    if agent is None:
        raise RuntimeError("the engine has no agent: it is not complete yet")
    return agent


def _weights_changed(engine: Any, agent: EngineAgent) -> None:
    try:
        compute_anew(engine)
        _finish_copies(engine)
    finally:
        agent.weights_changed()


def _finish_copies(engine: Any) -> None:
    """Wait for the copies of weights, which the device makes in another order than forwards."""
    if getattr(engine.executor, "model_agent", None) is not None:
        import torch

        torch.cuda.synchronize()


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def engine_sleep(original: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """``Engine.sleep``: the pool is freed, so the prefix cache is forgotten; what lies below HBM stays while the
    weights do.
    """

    async def sleep(self: Any, level: int = 1) -> None:
        agent = _agent(self)
        async with agent.pauses.lock:
            try:
                await original(self, level)
            finally:
                if level >= _WEIGHTS_ARE_LOST:
                    agent.weights_changed()
                else:
                    agent.pool_gone()

    return sleep


def engine_wakeup(original: Callable[[Any, Any], None]) -> Callable[..., None]:
    """``Engine.wakeup``: of what sleeps alone, and not while it is being put to sleep.

    LMDeploy gives an engine that is awake another KV pool, under the forwards that use the one it has.
    """

    def wakeup(self: Any, tags: list[str] | None = None) -> None:
        if _agent(self).pauses.lock.locked():
            raise EngineBusyError("the engine can't be woken while it is put to sleep or its weights change; ask again")
        asleep = set(self._sleeping_tags)
        wanted = sorted(asleep if tags is None else asleep.intersection(tags))
        if wanted:
            original(self, wanted)
        else:
            _log.warning("no tag to wake up: requested %s, asleep %s", tags, sorted(asleep))

    return wakeup


def engine_update_params(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``Engine.update_params``: in a pause alone; other weights, other KV."""

    def update_params(self: Any, request: Any) -> Any:
        agent = _agent(self)
        if not agent.pauses.is_paused:
            raise EngineBusyError("weights can't change during the engine's steps; use EngineWorkerBase.update_params")
        try:
            return original(self, request)
        finally:
            _weights_changed(self, agent)

    return update_params


def worker_update_params(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Awaitable[Any]]:
    """``EngineWorkerBase.update_params``: what the api_server calls; a coroutine, which can wait for the steps."""

    async def update_params(self: Any, request: Any) -> Any:
        async with _agent(self.engine).pauses.pause():
            return original(self, request)

    return update_params


def executor_of_one_device(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A method of ``UniExecutor`` that LMDeploy has not implemented there: its model agent's does the work."""
    name = original.__name__

    def on_the_model_agent(self: Any, request: Any) -> Any:
        return getattr(self.model_agent, name)(request)

    return on_the_model_agent


def engine_update_weights(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """``Engine.update_weights_from_ipc`` and ``update_weights_from_distributed``, which work on another thread."""

    async def update_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        agent = _agent(self)
        async with agent.pauses.pause():
            try:
                return await original(self, *args, **kwargs)
            finally:
                _weights_changed(self, agent)

    return update_weights
