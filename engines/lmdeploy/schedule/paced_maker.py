"""What takes the place of LMDeploy's symbols so that a pace chooses each step (the tables are in ``hooks/``)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engines.lmdeploy.schedule.pacing import give_pacer, pacer_of
from engines.lmdeploy.schedule.step_watch import step_of, timeline_of


def scheduler_init(original: Callable[..., None]) -> Callable[..., None]:
    """``Scheduler.__init__``: it gets its pacer."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # called by this name
        original(self, *args, **kwargs)
        give_pacer(self)

    return __init__


def maker_init_do_prefill(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """``InputsMakerAsync._init_do_prefill``: who says whether prompts are next. Not where an engine computes prompts
    alone, nor where several have to agree on each step.
    """

    def _init_do_prefill(self: Any, config: Any) -> None:
        from lmdeploy.pytorch.disagg.config import EngineRole

        original(self, config)
        pacer, rule = pacer_of(self.scheduler), self.do_prefill
        if pacer is None or config.role is EngineRole.Prefill or config.enable_chunked_prefill or config.dp > 1:
            return
        pacer.bind(self)
        self.do_prefill = lambda: pacer.choose(rule)

    return _init_do_prefill


def maker_reset_runtime_state(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``InputsMakerAsync.reset_runtime_state``: the engine goes to sleep; owed steps are cancelled."""

    def reset_runtime_state(self: Any) -> None:
        original(self)
        pacer = pacer_of(self.scheduler)
        if pacer is not None:
            pacer.forget()
            pacer.overtaking.forget()
            if pacer.overlap is not None:
                pacer.overlap.forget()

    return reset_runtime_state


def maker_make_forward_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """``InputsMakerAsync._make_forward_inputs``: record a step, and its effect on the owed decode steps."""

    def _make_forward_inputs(self: Any, prefill: bool, enable_empty: bool = False) -> Any:  # noqa: FBT001, FBT002
        payload = original(self, prefill, enable_empty)
        pacer, timeline = pacer_of(self.scheduler), timeline_of(self.scheduler)
        overlaps = payload is not None and pacer is not None and pacer.overlaps(payload)
        step = None if payload is None else step_of(self, payload)
        if step is not None and overlaps:
            step = replace(step, kind="overlapped")
        if step is None:
            if pacer is not None:
                pacer.made_nothing()
            return payload
        if pacer is not None:
            inputs = payload["inputs"]
            is_continued = inputs is not None and inputs.is_chunk and not inputs.is_first_chunk
            step = pacer.sent(step, is_continued=is_continued)
        if timeline is not None:
            timeline.sent(step)
        return payload

    return _make_forward_inputs


def task_should_defer_active_chunk(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """``_ForwardInputsTask._should_defer_active_chunk``: a chunk, the last one too, lets the decode steps that are owed
    pass.
    """

    def _should_defer_active_chunk(self: Any) -> bool:
        pacer = pacer_of(self.scheduler)
        defers = None if pacer is None or not self.maker.long_context_chunker.enabled() else pacer.defers_chunk()
        return original(self) if defers is None else defers

    return _should_defer_active_chunk


def task_try_active_chunk(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``_ForwardInputsTask._try_active_chunk``: a shorter prompt instead; or, without room, the one it overtook."""

    def _try_active_chunk(self: Any) -> None:
        pacer = pacer_of(self.scheduler)
        if pacer is not None and pacer.overtakes(self):
            return
        original(self)
        while pacer is not None and self.state.active_chunk_blocked_by_kv and pacer.overtaking.give_way(self):
            original(self)

    return _try_active_chunk


def maker_has_pending_chunk(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """``InputsMakerAsync.has_pending_long_context_chunk``: a prompt that was overtaken is work, too."""

    def has_pending_long_context_chunk(self: Any) -> bool:
        pacer = pacer_of(self.scheduler)
        return original(self) or (pacer is not None and pacer.overtaking.has_parked)

    return has_pending_long_context_chunk
