"""Every table of hooks that the package exports, as one list."""

from inspect import Parameter, isclass, signature
from typing import Any

from engines.lmdeploy import hooks
from engines.lmdeploy.cpu.resources import CpuResources
from engines.lmdeploy.patching import Hook, _locate, _raw

_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def all_hooks(resources: CpuResources) -> list[Hook]:
    """Return every hook of every table."""
    tables = [getattr(hooks, name) for name in hooks.__all__]
    return [hook for table in tables for hook in (table(resources) if signature(table).parameters else table())]


def arguments_not_taken(hook: Hook) -> list[str]:
    """Return the names of the symbol's arguments that its replacement doesn't take: LMDeploy may pass each by name."""
    original = _raw(*_locate(hook.target))
    theirs, ours = _function(original), _function(hook.replace(original))
    if hook.signature is None or not callable(theirs) or not callable(ours) or isclass(theirs) or isclass(ours):
        return []
    taken = signature(ours, follow_wrapped=False).parameters.values()
    if any(each.kind is Parameter.VAR_KEYWORD for each in taken):
        return []
    names = {each.name for each in taken if each.kind in _BY_NAME}
    passed = [each.name for each in signature(theirs).parameters.values() if each.kind in _BY_NAME]
    return [name for name in passed if name not in names]


def _function(symbol: Any) -> Any:
    if isinstance(symbol, classmethod | staticmethod):
        return symbol.__func__
    return symbol.fget if isinstance(symbol, property) else symbol


__all__ = ["all_hooks", "arguments_not_taken"]
