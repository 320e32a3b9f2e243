"""CUDA graphs of short prompts: LMDeploy captures them for models that carry a mark, and some that could lack it.

A short prompt (the new turn of a cached chat) is bound by the launch of its kernels: 50 ms for a 7B model, 25 ms from
piecewise graphs (H200). Their contract is the conventional forward of a decoder, which these models have.

LMDeploy ends the engine where such a graph can't be captured, or doesn't fit a prompt that it was chosen for. Here
these prompts are computed without one, and the log has the reason.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from engines.lmdeploy.attention.overlapped import launch
from engines.lmdeploy.graphs import reason

MARKED_HERE: Final = frozenset({"Qwen2ForCausalLM", "LlamaForCausalLM"})
"""Models with LMDeploy's conventional decoder forward that were tried with piecewise graphs on a card."""
_log = logging.getLogger("lmdeploy.kvgate")


class PromptGraphs:
    """LMDeploy's ``PiecewiseGraphManager`` of one model, with eager steps where no graph fits.

    After the first graph that can't be captured no other is tried; those that were captured stay.
    """

    def __init__(self, manager: Any, model: Any) -> None:
        self._manager = manager
        self._model = model
        self._captures = True
        self._refused: set[Any] = set()

    def get_capture_token_sizes(self) -> list[int]:
        """Return the token sizes to prepare at start."""
        sizes: list[int] = self._manager.get_capture_token_sizes()
        return sizes

    def get_piecewise_graph_descriptor(self, context: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the key of a graph, None if the step runs eagerly."""
        if launch.is_overlapped:
            return None
        descriptor = self._manager.get_piecewise_graph_descriptor(context, kwargs)
        return None if descriptor in self._refused else descriptor

    def has_plan(self, descriptor: Any) -> bool:
        """Return whether a graph was captured."""
        return bool(self._manager.has_plan(descriptor))

    def prepare(self, descriptor: Any, kwargs: Mapping[str, Any]) -> Any:
        """Capture a graph and return the step's output."""
        if self._captures:
            try:
                return self._manager.prepare(descriptor, kwargs)
            except Exception as error:  # noqa: BLE001 - a driver, a compiler or a kernel may raise anything
                self._captures = False
                tokens = kwargs["input_ids"].size(1)
                _log.warning("no CUDA graphs for prompts of %d tokens (%s): they run eagerly", tokens, reason(error))
        return self._eagerly(kwargs)

    def replay(self, descriptor: Any, kwargs: Mapping[str, Any]) -> Any:
        """Compute a step with its graph; eagerly from now on where the graph doesn't fit the step."""
        from lmdeploy.pytorch.backends.cuda.graph_runner.piecewise import PiecewiseGraphGuardError

        try:
            return self._manager.replay(descriptor, kwargs)
        except PiecewiseGraphGuardError as error:  # it is raised before anything is computed
            self._refused.add(descriptor)
            tokens = kwargs["input_ids"].size(1)
            _log.warning("the CUDA graph for prompts of %d tokens doesn't fit (%s): they run eagerly", tokens, error)
        return self._eagerly(kwargs)

    def reset(self) -> None:
        """Drop all graphs."""
        self._refused.clear()
        self._manager.reset()

    def _eagerly(self, kwargs: Mapping[str, Any]) -> Any:
        return self._model.make_output_buffers(self._model(**kwargs))


def make_piecewise_graph_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_make_piecewise_graph_manager``, in the engine process: a model that can carries the mark."""

    def make(model: Any, *arguments: Any, **more: Any) -> Any:
        from lmdeploy.pytorch.models.utils.cudagraph import PiecewiseCudaGraphMixin

        kind = type(model)
        if kind.__name__ in MARKED_HERE and not isinstance(model, PiecewiseCudaGraphMixin):
            model.__class__ = type(kind.__name__, (kind, PiecewiseCudaGraphMixin), {"__module__": kind.__module__})
        try:
            manager = original(model, *arguments, **more)
        except Exception as error:  # noqa: BLE001 - a model may differ from the conventional one in any way
            _log.warning("no CUDA graphs for prompts of %s (%s): they run eagerly", kind.__name__, reason(error))
            return None
        return None if manager is None else PromptGraphs(manager, model)

    return make
