"""The requests that are of the highest class, or have risen to it, and that instances haven't begun to answer."""

from kvcontrol.core.ids import InstanceId


class Urgent:
    """Counts them by instance; each is given back exactly once by its owner."""

    def __init__(self) -> None:
        self._counts: dict[InstanceId, int] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._counts)

    def at(self, instance: InstanceId) -> int:
        """How many an instance has."""
        return self._counts.get(instance, 0)

    def came(self, instance: InstanceId) -> None:
        """One more is there."""
        self._counts[instance] = self._counts.get(instance, 0) + 1

    def went(self, instance: InstanceId) -> None:
        """One of them has an answer, or is there no more."""
        left = self._counts[instance] - 1
        if left:
            self._counts[instance] = left
        else:
            del self._counts[instance]
