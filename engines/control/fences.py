"""The newest fence of each kind of policy, by the store that issued it.

A change that was under way when its gateway died may arrive after newer changes; its fence shows that. Stores count
independently of each other: a fence of another store, such as a new one, is compared with its own numbers only.
"""

from typing import Final

from engines.control.errors import StaleFenceError
from kvcontrol.core.policy_control import Fence

MOST_STORES: Final = 8
"""Stores remembered for a kind; the one that sent no change for the longest time is forgotten."""


class Fences:
    """One engine's; lives as long as its process."""

    def __init__(self) -> None:
        self._newest: dict[str, dict[str, int]] = {}

    def accept(self, kind: str, fence: Fence) -> None:
        """Remember the fence of a change, also of one that is refused later for another reason; raises
        ``StaleFenceError`` for a fence that is older than the newest.
        """
        by_store = self._newest.setdefault(kind, {})
        newest = by_store.pop(fence.store, fence.number)
        by_store[fence.store] = max(newest, fence.number)
        if len(by_store) > MOST_STORES:
            del by_store[next(iter(by_store))]
        if fence.number < newest:
            raise StaleFenceError(
                f"a newer change of kind {kind!r} came before this one: the fence {fence.number} of store "
                f"{fence.store!r} is older than {newest}; nothing was changed. Read the policy, and send the change "
                "again with a newer fence, or without one"
            )

    def report(self) -> dict[str, dict[str, int]]:
        """Return the newest number by kind and store; any thread."""
        return {kind: dict(by_store) for kind, by_store in list(self._newest.items())}
