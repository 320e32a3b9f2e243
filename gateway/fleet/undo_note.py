"""The note that describes how to undo an operation, written before instances change."""

from collections.abc import Mapping

import msgspec

from gateway.fleet.policies import Policy
from kvcontrol.core.errors import UNREADABLE
from kvcontrol.core.ids import InstanceId


class NotedPolicy(Policy, frozen=True, kw_only=True):
    """A policy that an instance ran before."""

    instance: str


class NotedPin(msgspec.Struct, frozen=True):
    """A prefix that an instance did not keep before, by the instance's name for it."""

    instance: str
    name: str


class UndoNote(msgspec.Struct, frozen=True):
    """The earlier state of everything that an operation changes on instances."""

    policies: list[NotedPolicy] = []
    pins: list[NotedPin] = []

    def text(self) -> str:
        """Return it as JSON."""
        return msgspec.json.encode(self).decode()


def noted(before: Mapping[InstanceId, Policy]) -> list[NotedPolicy]:
    """Return the earlier policies of instances for a note."""
    return [
        NotedPolicy(instance=instance, kind=policy.kind, name=policy.name, params=policy.params)
        for instance, policy in before.items()
    ]


def read_note(text: str) -> UndoNote:
    """Read a note; an empty one, or one that this version can't read, contains nothing to undo."""
    try:
        return msgspec.json.decode(text, type=UndoNote)
    except UNREADABLE:
        return UndoNote()
