"""A case: a name, where it was seen to break, and a coroutine that says why it breaks here."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from lab.conformance.rig import Rig


class BrokenError(Exception):
    """The target does not do what the case asks; the message says what it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``background`` cases mostly wait: they run beside the others and are awaited at the end. One that ``ends_target``
    runs after all others, where the target's process is known. ``about`` is the first line of the check's docstring,
    ``seen`` names projects and issues in which it broke.
    """

    id: str
    seen: str
    check: Callable[[Rig], Awaitable[None]]
    background: bool = False
    ends_target: bool = False

    @property
    def about(self) -> str:
        return (self.check.__doc__ or "").strip().partition("\n")[0]


def case(
    identity: str, *, seen: str, background: bool = False, ends_target: bool = False
) -> Callable[[Callable[[Rig], Awaitable[None]]], Case]:
    """Make a case of a coroutine function."""

    def made(check: Callable[[Rig], Awaitable[None]]) -> Case:
        return Case(id=identity, seen=seen, check=check, background=background, ends_target=ends_target)

    return made


def need(condition: object, why: str) -> None:
    """Break the case unless ``condition`` holds."""
    if not condition:
        raise BrokenError(why)
