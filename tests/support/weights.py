"""Weights of a model folder as LMDeploy's ``/update_weights`` takes them, for an engine on a CPU."""

from collections.abc import Iterable, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pybase64


def read_weights(folder: Path) -> dict[str, "np.ndarray[Any, Any]"]:
    """Return a folder's tensors by name."""
    from safetensors.numpy import load_file

    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def rebuild(array: "np.ndarray[Any, Any]", *_: object) -> Any:
    """Make a tensor of what was sent; LMDeploy puts its device among the arguments."""
    import torch

    return torch.from_numpy(array)


def update_body(tensors: Mapping[str, "np.ndarray[Any, Any]"], *, finished: bool = True) -> dict[str, Any]:
    """Return the body of a request that loads tensors into a running engine."""
    sent = [(name, (rebuild, (array, *[0] * 6))) for name, array in tensors.items()]
    text = pybase64.b64encode(bytes(ForkingPickler.dumps(sent))).decode()
    return {"serialized_named_tensors": text, "load_format": None, "finished": finished}


def update_request(tensors: Mapping[str, "np.ndarray[Any, Any]"], *, finished: bool = True) -> Any:
    """Return such a request as the engine gets it."""
    from lmdeploy.serve.openai.protocol import UpdateParamsRequest

    return UpdateParamsRequest(**update_body(tensors, finished=finished))


def broken_after(tensors: Mapping[str, "np.ndarray[Any, Any]"], whole: Iterable[str]) -> dict[str, Any]:
    """Return some tensors whole and one more that doesn't fit: loading them fails half-way."""
    names = list(whole)
    [misfit, *_] = [name for name in tensors if name not in names]
    return {name: tensors[name] for name in names} | {misfit: np.zeros((7, 7, 7), np.float32)}


__all__ = ["broken_after", "read_weights", "rebuild", "update_body", "update_request"]
