"""A command's options as one value: each field of a dataclass is an option of the command."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, get_type_hints

Options = TypeVar("Options")


def takes(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Return a decorator that makes a function of one dataclass a command with the dataclass's fields as options.

    Typer reads a command's options from its signature; thirty parameters there would be listed once more at each use.
    Its own fields come before those of its base classes.
    """
    signature = inspect.signature(options)
    names = [name for kind in options.__mro__ for name in vars(kind).get("__annotations__", ())]
    own_first = [signature.parameters[name] for name in dict.fromkeys(names)]

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        @wraps(command)
        def run(**typed: Any) -> None:
            command(options(**typed))

        run.__signature__ = signature.replace(parameters=own_first)  # type: ignore[attr-defined]
        run.__annotations__ = get_type_hints(options, include_extras=True)
        return run

    return decorate
