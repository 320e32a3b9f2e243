"""How LMDeploy's private symbols are replaced: check every one first, then replace them all, or none.

A ``Hook`` names a symbol, the signature that it must still have, and a function from the original to its replacement.
``install`` raises ``HookMismatchError`` with the list of all symbols that moved before it touches the first one, so
that an LMDeploy upgrade fails at start-up with names, not later with odd behaviour. Modules that imported a replaced
function by name are rebound too.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


class HookMismatchError(RuntimeError):
    """LMDeploy differs from the hooks' expectations; ``problems`` has one line for each symbol."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("LMDeploy's internals are not what kvgate's hooks expect:\n  " + "\n  ".join(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One replaced symbol.

    ``target`` is ``package.module:Name`` or ``package.module:Class.name``. ``signature`` is
    ``str(inspect.signature(...))`` of the original, or None for what can't be called. ``replace`` gets the original
    (for class methods, static methods and properties: the raw object) and returns what takes its place; a property's
    signature is its getter's. ``why`` is one sentence.
    """

    target: str
    signature: str | None
    replace: Callable[[Any], Any]
    why: str


def problem_of(hook: Hook) -> str | None:
    """Return in one line how the installed LMDeploy differs from a hook's expectation; None if it fits."""
    try:
        owner, name = _locate(hook.target)
        original = _raw(owner, name)
    except (ImportError, AttributeError) as error:
        return f"{hook.target} does not exist ({error})"
    if hook.signature is None:
        return None
    found = signature_of(original)
    if found != hook.signature:
        return f"{hook.target} has the signature {found}, expected {hook.signature}"
    return None


def signature_of(original: Any) -> str:
    """Return the text that ``Hook.signature`` is compared with."""
    function: Any = original
    if isinstance(original, classmethod | staticmethod):
        function = original.__func__
    elif isinstance(original, property):
        function = original.fget
    try:
        return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(function)))  # some annotations are objects
    except (TypeError, ValueError) as error:
        return f"<none: {error}>"


def install(hooks: Sequence[Hook]) -> Callable[[], None]:
    """Check all hooks, then install them in order; the function returned takes them out again.

    Raises ``HookMismatchError`` and changes nothing when any doesn't fit. A target may be hooked more than once in one
    call (each wraps the one before); installing the same table twice would wrap twice, so callers do it once.
    """
    problems = [problem for hook in hooks if (problem := problem_of(hook)) is not None]
    if problems:
        raise HookMismatchError(problems)
    replaced: list[tuple[Any, str, Any, Any]] = []
    names = _ImportedNames()
    for hook in hooks:
        owner, name = _locate(hook.target)
        before = _raw(owner, name)
        replacement = hook.replace(names.now(before))
        names.set(owner, name, before, replacement)
        replaced.append((owner, name, before, replacement))
    names.rebind()

    def undo() -> None:
        names = _ImportedNames()
        for owner, name, before, replacement in reversed(replaced):
            names.set(owner, name, replacement, before)
        names.rebind()

    return undo


def _locate(target: str) -> tuple[Any, str]:
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def _raw(owner: Any, name: str) -> Any:
    if inspect.isclass(owner):
        for base in owner.__mro__:
            if name in vars(base):
                return vars(base)[name]
    return getattr(owner, name)


class _ImportedNames:
    """Module-level symbols with their replacements, for the modules that imported them by name.

    All replacements are rebound in one pass: a pass looks at every name of every loaded LMDeploy module, and one for
    each hook would take half a second of an engine's start.
    """

    def __init__(self) -> None:
        self._replacements: dict[int, tuple[Any, Any]] = {}

    def now(self, value: Any) -> Any:
        """Return the last replacement of a symbol, or the symbol itself where it has none."""
        while id(value) in self._replacements:
            value = self._replacements[id(value)][1]
        return value

    def set(self, owner: Any, name: str, old: Any, new: Any) -> None:
        setattr(owner, name, new)
        if inspect.ismodule(owner):
            old = self.now(old)
            if new is not old:
                self._replacements[id(old)] = (old, new)  # holding the old one keeps its id its own

    def rebind(self) -> None:
        """Replace every symbol in every loaded LMDeploy module that imported it by name."""
        for module_name, module in list(sys.modules.items()):
            if module is None or module_name.partition(".")[0] != "lmdeploy":
                continue
            for key, value in list(vars(module).items()):
                if id(value) in self._replacements:
                    setattr(module, key, self.now(value))
