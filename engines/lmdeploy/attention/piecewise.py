"""CUDA graphs of short prompts: LMDeploy captures them for models that carry a mark, and some that could lack it.

A short prompt (the new turn of a cached chat) is bound by the launch of its kernels: 50 ms for a 7B model, 25 ms from
piecewise graphs (H200). Their contract is the conventional forward of a decoder, which these models have.
"""

from collections.abc import Callable
from typing import Any, Final

MARKED_HERE: Final = frozenset({"Qwen2ForCausalLM", "LlamaForCausalLM"})
"""Models with LMDeploy's conventional decoder forward that were tried with piecewise graphs on a card."""


def make_piecewise_graph_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_make_piecewise_graph_manager``, in the engine process: a model that can carries the mark."""

    def make(model: Any, *arguments: Any, **more: Any) -> Any:
        from lmdeploy.pytorch.models.utils.cudagraph import PiecewiseCudaGraphMixin

        kind = type(model)
        if kind.__name__ in MARKED_HERE and not isinstance(model, PiecewiseCudaGraphMixin):
            model.__class__ = type(kind.__name__, (kind, PiecewiseCudaGraphMixin), {"__module__": kind.__module__})
        return original(model, *arguments, **more)

    return make


__all__ = ["MARKED_HERE", "make_piecewise_graph_manager"]
