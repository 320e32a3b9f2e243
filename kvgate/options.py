"""A command's options as one value: each field of a dataclass is an option of the command."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, get_type_hints

Options = TypeVar("Options")


def takes(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Return a decorator that makes a function of one dataclass a command with the dataclass's fields as options.

    Typer reads a command's options from its signature; thirty parameters there would be listed once more at each use.
    """

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        @wraps(command)
        def run(**typed: Any) -> None:
            command(options(**typed))

        run.__signature__ = inspect.signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = get_type_hints(options, include_extras=True)
        return run

    return decorate
