"""Where an LMDeploy engine's steps are noted for its timeline: chosen, begun, ended, and waited for.

The scheduler and the model meet in one thread where LMDeploy computes in its engine process (one device); with more
devices the model runs in other processes, and a step lasts from its sending until its tokens are back.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from engines.lmdeploy.schedule.step_clock import CudaMoments, HostMoments, Moments
from engines.lmdeploy.schedule.step_timeline import SentStep, StepTimeline
from kvcontrol.core.steps import StepKind

_STEPS: Final = "kvgate_steps"


def timeline_of(owner: Any) -> StepTimeline | None:
    """Return the timeline of LMDeploy's scheduler or model agent, None where there is none."""
    timeline: StepTimeline | None = getattr(owner, _STEPS, None)
    return timeline


def step_of(maker: Any, payload: dict[str, Any]) -> SentStep | None:
    """Return the step that LMDeploy's ``InputsMakerAsync`` will send; None without work."""
    inputs, delta = payload["inputs"], payload["delta"]
    if inputs is None:
        if delta is None:
            return None
        sequences = len(payload["running"])
        tokens = sequences * int(delta.max_q_seqlen)
        history = max(0, int(delta.sum_kv_seqlen) - tokens)
        kind: StepKind = "decode"
        pairs = float(history) * int(delta.max_q_seqlen)
    else:
        lengths, histories = inputs.seq_length.tolist(), inputs.history_lengths.tolist()
        sequences, tokens, history = len(lengths), sum(lengths), sum(histories)
        pairs = float(sum(length * (past + length / 2) for length, past in zip(lengths, histories, strict=True)))
        is_part = inputs.is_chunk and not inputs.is_last_chunk
        kind = "other" if inputs.is_decoding else "chunk" if is_part else "prefill"
    return SentStep(
        kind=kind,
        sequences=sequences,
        tokens=int(tokens),
        history_tokens=int(history),
        pairs=pairs,
        reason="lmdeploy",
        answering=answering(maker),
        waiting=int(maker.scheduler.num_waiting()),
        sent_s=time.perf_counter(),
    )


def answering(maker: Any) -> int:
    """Return how many running answers of an ``InputsMakerAsync`` want a next token; its list keeps ended ones."""
    from lmdeploy.pytorch.messages import MessageStatus

    running = MessageStatus.RUNNING
    return sum(seq.status is running for seq in maker.running_seqs)


def _moments_of(maker: Any) -> tuple[Moments, Any]:
    """Return the clock of steps, and their model agent (None: in other processes)."""
    agent = getattr(maker.executor, "model_agent", None)
    if agent is None or maker.config.dp > 1:
        return HostMoments("round_trip"), None
    return (CudaMoments(agent.stream) if agent.device == "cuda" else HostMoments()), agent


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def maker_init_do_prefill(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """``InputsMakerAsync._init_do_prefill``: an engine whose loop begins gets its timeline."""

    def _init_do_prefill(self: Any, config: Any) -> None:
        original(self, config)
        if timeline_of(self.scheduler) is not None:  # the loop was begun anew
            return
        moments, agent = _moments_of(self)
        timeline = StepTimeline(moments)
        setattr(self.scheduler, _STEPS, timeline)
        if agent is not None:
            setattr(agent, _STEPS, timeline)

    return _init_do_prefill


def maker_reset_runtime_state(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``InputsMakerAsync.reset_runtime_state``: the engine goes to sleep; forwards that were sent are dropped."""

    def reset_runtime_state(self: Any) -> None:
        original(self)
        timeline = timeline_of(self.scheduler)
        if timeline is not None:
            timeline.forget()

    return reset_runtime_state


def agent_step(original: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """``BaseModelAgent._async_step``: a step of the model, or a look at pending loads."""

    async def _async_step(self: Any, inputs: Any, delta: Any = None, *args: Any, **kwargs: Any) -> None:
        timeline = timeline_of(self)
        if timeline is None or (inputs is not None and inputs.is_dummy):
            await original(self, inputs, delta, *args, **kwargs)
            return
        if inputs is None and delta is None:
            timeline.idle_for("kv")
            await original(self, inputs, delta, *args, **kwargs)
            return
        timeline.take(is_decode=inputs is None)
        try:
            await original(self, inputs, delta, *args, **kwargs)
        except BaseException:
            timeline.fail()
            raise
        timeline.end()

    return _async_step


def agent_model_forward(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """``BaseModelAgent._async_model_forward``: the device's part of a step begins."""

    async def _async_model_forward(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        timeline = timeline_of(self)
        if timeline is not None:
            timeline.begin()
        return await original(self, inputs, *args, **kwargs)

    return _async_model_forward


def loop_finish_forward_output(original: Callable[..., None]) -> Callable[..., None]:
    """``EngineLoop._finish_forward_output``: tokens are back."""

    def _finish_forward_output(self: Any, out: Any, running: Any, model_inputs: Any, delta: Any) -> None:
        timeline = timeline_of(self.scheduler)
        if timeline is not None:
            if timeline.is_round_trip and (model_inputs is not None or delta is not None):
                timeline.arrived(is_decode=model_inputs is None)
            timeline.settle()
        original(self, out, running, model_inputs, delta)

    return _finish_forward_output


def runable_wait(original: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
    """``RunableEventAsync.wait``: the engine has no request."""

    async def wait(self: Any) -> None:
        timeline = timeline_of(self.scheduler)
        if timeline is None:
            await original(self)
            return
        timeline.settle_soon()
        with timeline.waiting("no_work"):
            await original(self)

    return wait


def loop_wait_for_prefill(original: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
    """``EngineLoop._wait_for_schedulable_prefill``: requests wait for blocks or for loads."""

    async def _wait_for_schedulable_prefill(self: Any) -> None:
        timeline = timeline_of(self.scheduler)
        if timeline is None:
            await original(self)
            return
        with timeline.waiting("kv"):
            await original(self)

    return _wait_for_schedulable_prefill


def loop_resume_from_sleep(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``EngineLoop.resume_from_sleep``: the engine was asleep until now."""

    def resume_from_sleep(self: Any) -> None:
        timeline = timeline_of(self.scheduler)
        if timeline is not None:
            timeline.idle_for("no_work")
        original(self)

    return resume_from_sleep
