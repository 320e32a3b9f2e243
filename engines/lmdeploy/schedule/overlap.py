"""Chunks of prompts that a GPU computes on a second stream, beside the decode steps of running answers.

LMDeploy computes all steps on one stream, so answers stand still while a prompt is computed. A chunk that is not its
prompt's last one gives no token: nothing of a decode step depends on it. So it is launched on a stream of its own, and
is answered at once, as if it were over; decode steps follow on the first stream, which has priority. To launch all of
its kernels takes the host as long as several decode steps, so it is launched some layers at a time, between them.

What keeps the order (all on the engine's thread):

- The chunk waits for all that was launched before it.
- A step that computes prompts waits for the chunk: it may read the chunk's blocks, as its prompt's next part or as a
  prefix that another prompt shares.
- A prompt whose chunk is under way may lose its blocks: cancelled, or computed again later. From the moment in which it
  isn't running any more, all that is launched waits for the chunk: whoever gets the blocks writes after it.
- Saves of the chunk's blocks to a tier start after the chunk.
- Weights change, and the engine's pool goes, after the chunk (``settled``).

Chunks whose step has more to do than fill the pool don't overlap: input log-probabilities, images, recurrent states,
adapters in another stream's hands, draft models; nor do those of an engine whose model runs in other processes.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from engines.lmdeploy.attention.overlapped import overlapped
from engines.lmdeploy.schedule.overtaking import is_plain_model
from engines.lmdeploy.schedule.step_timeline import OpenStep, StepTimeline
from engines.lmdeploy.schedule.step_watch import timeline_of
from engines.lmdeploy.schedule.stepped_call import SteppedCall

_OVERLAP: Final = "kvgate_overlap"
_KEY: Final = "kvgate_overlaps"
_POLL_S: Final = 0.002
_PLAIN: Final = ("return_logits", "return_routed_experts", "return_ce_loss", "swap_in_map", "swap_out_map")
"""What a chunk's step must not ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """A chunk whose layers are being launched. ``saves`` are the connector's orders."""

    call: SteppedCall
    reserved: int
    step: OpenStep | None
    saves: Any


class Overlap:
    """The second stream of one engine. The engine's thread."""

    def __init__(self, agent: Any) -> None:
        import torch

        self._agent = agent
        self._stream = torch.cuda.Stream()
        self._seq: Any = None
        self._end: Any = None
        self._launch: _Launch | None = None
        self._is_lost = False
        self.make_event: Callable[[], Any] = torch.cuda.Event
        self.count = 0

    @property
    def _timeline(self) -> StepTimeline:
        """Of the scheduler in charge: the one that warms the engine up has its own."""
        timeline = timeline_of(self._agent)
        assert timeline is not None  # noqa: S101 - an engine whose loop begins gets it first
        return timeline

    @property
    def is_busy(self) -> bool:
        """Whether a chunk was sent and the device has not computed it yet."""
        if self._seq is not None and self._end is not None and self._end.query():
            self._seq = self._end = None
        return self._seq is not None

    def admits(self, payload: dict[str, Any]) -> bool:
        """Return whether a step that LMDeploy made is a chunk that can overlap."""
        inputs = payload["inputs"]
        return (
            inputs is not None
            and inputs.is_chunk
            and not inputs.is_last_chunk
            and payload["delta"] is None
            and payload["cache_inputs"] is None
            and inputs.logits_indices is None
            and inputs.vision_inputs is None
            and not any(payload[name] for name in _PLAIN)
            and not self.is_busy
        )

    def send(self, payload: dict[str, Any], reserved_share: float) -> None:
        """Let the chunk of a step overlap with those that follow."""
        (self._seq,) = payload["running"]
        self._end, self._is_lost = None, False
        payload[_KEY] = reserved_share

    def lost(self, seq: Any) -> None:
        """A sequence is not running any more: what is launched from now on may get its blocks."""
        if seq is self._seq:
            self._is_lost = True
            self.join()

    def forget(self) -> None:
        """The engine goes to sleep: a chunk that was sent and not begun is dropped."""
        self.launch_rest()
        if self._end is None:
            self._seq = None

    async def settled(self) -> None:
        """Wait until the device has computed the chunk that is under way."""
        self.join()
        while self.is_busy:  # noqa: ASYNC110 - an event of the device, which nobody awaits
            await asyncio.sleep(_POLL_S)

    def after_decode(self) -> None:
        """A decode step was launched."""
        if self._launch is not None:
            self._launch_part(self._launch)

    def compute(self, reserved_share: float, *, inputs: Any, kv_connector_metadata: Any = None, **_: Any) -> None:
        """Answer a chunk's step; its layers are launched between the next steps. It is LMDeploy's ``_async_step``
        without logits and sampling.
        """
        import torch
        from lmdeploy.pytorch.engine.model_agent import agent as lmdeploy

        agent = self._agent
        transfers = lmdeploy.start_kv_connector_step(agent.kv_connector, kv_connector_metadata)
        inputs = agent._prepare_inputs_prefill(inputs, None)  # noqa: SLF001
        self._timeline.take(is_decode=False)
        self._stream.wait_stream(agent.stream)
        inputs.record_stream(self._stream)
        self._launch = _Launch(
            call=SteppedCall(partial(self._forward, inputs, torch.cuda.current_device())),
            reserved=self._reserved(reserved_share),
            step=self._timeline.begin_overlapped(self._stream),
            saves=kv_connector_metadata if transfers else None,
        )
        self.count += 1
        if self._is_lost:
            self.join()
        nothing = torch.zeros(1, dtype=torch.int64)
        agent._push_output(  # noqa: SLF001
            lmdeploy.BatchedOutputs(
                next_token_ids=nothing,
                stopped=nothing.bool(),
                kv_connector_output=lmdeploy.finish_kv_connector_step(agent.kv_connector, transfers),
            )
        )

    def _forward(self, inputs: Any, device: int) -> Any:
        """Launch the model's forward on the second stream; on a thread of its own."""
        import torch

        if self._agent.device == "cuda":
            torch.cuda.set_device(device)
        with torch.cuda.stream(self._stream):
            return self._agent._forward_impl(inputs)  # noqa: SLF001

    def _launch_part(self, launch: "_Launch") -> None:
        """Launch some layers of the chunk, and what follows on the last one."""
        import torch

        agent = self._agent
        main, agent.stream = agent.stream, self._stream
        try:
            with overlapped(launch.call.pause, launch.reserved):
                is_over = launch.call.resume()
        finally:
            agent.stream = main
        if not is_over:
            return
        self._launch = None
        agent._prev_chunk_output = {"model_metas": launch.call.result.get("model_metas")}  # noqa: SLF001
        launch.call.result = None
        with torch.cuda.stream(self._stream):
            end = self.make_event()
            end.record(self._stream)
            if launch.saves is not None:
                agent.kv_connector.bind_connector_metadata(launch.saves)
                agent.kv_connector.start_save_kv()
                agent.kv_connector.clear_connector_metadata()
        self._timeline.end_overlapped(launch.step, self._stream)
        self._end = end

    def launch_rest(self) -> None:
        """Launch what is left of the chunk."""
        while self._launch is not None:
            self._launch_part(self._launch)

    def join(self) -> None:
        """Let everything that is launched from now on wait for the chunk under way, if there is one."""
        if self.is_busy:
            self.launch_rest()
            if self._end is not None:
                self._agent.stream.wait_event(self._end)

    def _reserved(self, share: float) -> int:
        import torch

        if self._agent.device != "cuda":
            return 0
        return round(share * torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def overlap_of(owner: Any) -> Overlap | None:
    """Return the second stream of LMDeploy's model agent or sequence manager, None where there is none."""
    found: Overlap | None = getattr(owner, _OVERLAP, None)
    return found


def can_overlap(maker: Any) -> bool:
    """Whether an engine computes on one GPU in this process, with a model whose chunks only fill the pool."""
    agent = getattr(maker.executor, "model_agent", None)
    return (
        agent is not None
        and agent.device == "cuda"
        and agent.world_size == 1
        and maker.config.dp == 1
        and agent.memdecode_agent is None
        and is_plain_model(maker.config)
        and not agent.adapters
    )


def provide(maker: Any) -> Overlap:
    """Give the scheduler of an engine the engine's second stream, which is made for the first one."""
    agent = maker.executor.model_agent
    overlap = overlap_of(agent) or Overlap(agent)
    for owner in (agent, maker.scheduler.seq_manager):
        setattr(owner, _OVERLAP, overlap)
    return overlap


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def agent_init(original: Callable[..., None]) -> Callable[..., None]:
    """``BaseModelAgent.__init__``: decode steps have priority over a chunk beside them."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # called by this name
        import torch

        original(self, *args, **kwargs)
        self.stream = torch.cuda.Stream(priority=-1)

    return __init__


def agent_step(original: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """``BaseModelAgent._async_step``: an overlapping chunk, or a step that waits for one."""

    async def _async_step(self: Any, inputs: Any, delta: Any = None, *args: Any, **kwargs: Any) -> None:
        overlap, reserved_share = overlap_of(self), kwargs.pop(_KEY, None)
        if overlap is not None and reserved_share is not None:
            overlap.compute(reserved_share, inputs=inputs, **kwargs)
            return
        if overlap is not None and inputs is not None:
            overlap.join()
        await original(self, inputs, delta, *args, **kwargs)
        if overlap is not None and delta is not None:
            overlap.after_decode()

    return _async_step


def manager_unregister(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """``SequenceManager.unregister_sequence``: a sequence ends, and its blocks are free."""

    def unregister_sequence(self: Any, seq: Any) -> None:
        original(self, seq)
        overlap = overlap_of(self)
        if overlap is not None:
            overlap.lost(seq)

    return unregister_sequence


def manager_update(original: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """``SequenceManager.update_sequence_status``: a sequence that isn't running loses its blocks."""

    def update_sequence_status(self: Any, seq: Any, new_status: Any) -> None:
        original(self, seq, new_status)
        overlap = overlap_of(self)
        if overlap is not None and new_status.name not in {"READY", "RUNNING"}:
            overlap.lost(seq)

    return update_sequence_status
