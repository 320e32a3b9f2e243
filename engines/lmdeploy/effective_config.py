"""The configuration that determines an engine's KV besides its weights, as text: equal for equal KV.

Read from the running engine and not from the model's folder: command line options (``--hf-overrides``, ``--dtype``,
``--model-format``) change it, and so do LMDeploy's own defaults. Everything counts that is not known to be irrelevant:
a field that a later LMDeploy adds separates engines that may agree, which costs hits; one that is left out would serve
wrong KV.
"""

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from kvcontrol.core.errors import IdentityError

_OF_A_PLACE = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})
"""Where a configuration was read, and by what: the same model elsewhere has other values."""
_OF_A_RANK = frozenset({"dist_config"})
"""How an engine is spread over devices; what of that changes blocks is the identity's own (``tp_size``)."""
_OF_A_FILE = "custom_module_map"


def effective_config(engine: Any) -> str:
    """Return the effective configuration of an LMDeploy ``Engine`` as canonical JSON.

    Raises ``IdentityError`` for a value that has no text of its own, ``OSError`` for a module map that can't be read.
    """
    import lmdeploy

    modules = getattr(engine.engine_config, _OF_A_FILE, None)
    speculative = getattr(engine, "specdecode_config", None)
    memory = getattr(getattr(engine, "misc_config", None), "memdecode_config", None)
    return json.dumps(
        {
            "lmdeploy": str(lmdeploy.__version__),
            "device": str(engine.engine_config.device_type),
            "attention": attention_of(engine),
            "model": _plain(engine.model_config),
            "modules": None if modules is None else Path(modules).read_text(encoding="utf-8"),
            "speculative": None if speculative is None else _plain(getattr(speculative, "model_config", None)),
            "memory": None if memory is None else _plain(getattr(memory, "memory_model_config", None)),
        },
        sort_keys=True,
    )


def attention_of(engine: Any) -> list[str]:
    """Return the attention implementations of the model's layers, each once: they round differently.

    Empty where the model is in another process (tensor parallelism): only the device separates engines there.
    """
    agent = getattr(engine.executor, "model_agent", None)
    patched = getattr(agent, "patched_model", None)
    if patched is None:
        return []
    from lmdeploy.pytorch.backends.attention import AttentionImpl

    layers = (getattr(module, "impl", None) for module in patched.get_model().modules())
    return sorted({_name(type(layer)) for layer in layers if isinstance(layer, AttentionImpl)})


def _plain(value: Any) -> Any:  # noqa: PLR0911 - one kind of value a line
    """Return a value as JSON has it, the same in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items() if key not in _OF_A_PLACE}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(each) for each in value), key=str)
    if hasattr(value, "to_dict"):  # a configuration of transformers, which may have more than its declared fields
        return _plain(value.to_dict())
    if isinstance(value, type | FunctionType | MethodType):
        return _name(value)
    if dataclasses.is_dataclass(value):
        names = {each.name for each in dataclasses.fields(value)} - _OF_A_RANK - {_OF_A_FILE}
        return {name: _plain(getattr(value, name)) for name in sorted(names)}
    if type(value).__name__ == "dtype":  # torch's
        return str(value)
    raise IdentityError(
        f"the model's configuration has a {_name(type(value))}, which has no text that other engines share"
    )


def _name(each: Any) -> str:
    return f"{each.__module__}.{each.__qualname__}"
