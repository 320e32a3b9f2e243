"""Current problems of this gateway, for operators.

Shown by ``/admin/v1/status``; ``/readyz`` and the metrics have the kinds alone, since messages may name tenants.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

_log = logging.getLogger(__name__)


class ProblemKind(StrEnum):
    """What a problem is about."""

    DOCUMENT = "document"  # a stored document can't be read
    STORE = "store"  # the store can't be read
    REDIS = "redis"  # Redis can't be used, or may forget quotas
    OPERATION = "operation"  # an unfinished operation of a gateway that ended
    POLICY = "policy"  # an instance refuses a stored policy, or runs another one that no change explains
    DISCOVERY = "discovery"  # a place suddenly names far fewer instances
    CLOCK = "clock"  # this machine's clock differs from the store's
    FILES = "files"  # this process has no file descriptor left, or soon
    DISK = "disk"  # the store's disk is full, or soon


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem: ``subject`` tells it from others of its kind."""

    kind: ProblemKind
    subject: str
    message: str


class Problems:
    """Each one is logged when it appears, when its message changes, and when it is gone."""

    def __init__(self) -> None:
        self._found: dict[tuple[ProblemKind, str], str] = {}

    def report(self, kind: ProblemKind, subject: str, message: str) -> None:
        """Add a problem, or replace its message."""
        if self._found.get((kind, subject)) != message:
            self._found[kind, subject] = message
            _log.warning("%s: %s", subject, message)

    def clear(self, kind: ProblemKind, subject: str) -> None:
        """Remove a problem if it is there."""
        if self._found.pop((kind, subject), None) is not None:
            _log.info("%s: no problem any more", subject)

    def replace(self, kind: ProblemKind, prefix: str, found: Mapping[str, str]) -> None:
        """Make the problems of a kind whose subjects begin with ``prefix`` those of ``found``, by subject."""
        for subject in [each for at, each in self._found if at is kind and each.startswith(prefix)]:
            if subject not in found:
                self.clear(kind, subject)
        for subject, message in found.items():
            self.report(kind, subject, message)

    def all(self) -> tuple[Problem, ...]:
        """Return all of them, by kind and subject."""
        return tuple(
            Problem(kind=kind, subject=subject, message=message)
            for (kind, subject), message in sorted(self._found.items())
        )

    def counts(self) -> Mapping[ProblemKind, int]:
        """Return how many there are of each kind, kinds without any included."""
        found = Counter(kind for kind, _ in self._found)
        return {kind: found[kind] for kind in ProblemKind}
