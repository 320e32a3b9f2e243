"""Which strategy orders an engine's waiting queue: shown, and swapped between two steps of the engine.

The new strategy takes over all waiting requests in one call on the engine's thread; if that fails, the old one has
never stopped.
"""

import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from engines.control.errors import RefusedError
from engines.control.policy_changes import strategy_of
from kvcontrol.core.policy_control import PolicyChange, PolicyInCharge, ScheduleReport
from kvcontrol.kv_policy.spec import PolicySpec
from kvcontrol.scheduler_ir.strategies import STRATEGIES, WaitingQueue, make_strategy

SCHEDULE: Final = "schedule"


class StrategyQueue(Protocol):
    """An engine's waiting queue, in a strategy's order."""

    @property
    def strategy(self) -> str:
        """The order in charge."""

    @property
    def failed(self) -> bool:
        """Whether the engine's own order has taken over after an error."""

    def swap(self, queue: WaitingQueue) -> None:
        """Let another strategy's empty queue have all that wait; nothing has changed when it raises."""

    def report(self, *, swaps: int, in_charge_s: float) -> ScheduleReport:
        """Return the statistics."""


class ScheduleControl:
    """One engine's; swaps on the engine's thread, ``in_charge`` on any. ``queue`` gives None while there is none."""

    kind = SCHEDULE
    available: Mapping[str, str] = {name: kind.summary for name, kind in STRATEGIES.items()}

    def __init__(self, queue: Callable[[], StrategyQueue | None], *, first: str) -> None:
        self._queue = queue
        self._spec = PolicySpec(text=first, name=first, parameters={})
        self._began_s = time.monotonic()
        self._swaps = 0

    def spec_of(self, change: PolicyChange) -> PolicySpec:
        """Return the strategy that a change names; raises ``RefusedError`` or ``PolicyError``."""
        return strategy_of(change)

    def swap(self, spec: PolicySpec, *, counts: bool) -> None:
        """Put a strategy in charge; nothing has changed when it raises ``PolicyError`` or ``RefusedError``.

        Nothing happens when it is in charge already: a client that didn't get the answer may ask again.
        """
        fresh = make_strategy(spec.name, spec.parameters)
        queue = self._queue()
        if queue is None:
            raise RefusedError("kvgate's schedule is not active in this engine: the engine's own order applies")
        values, present = STRATEGIES[spec.name].values, self._spec
        if not queue.failed and present.name == spec.name and values(present.parameters) == values(spec.parameters):
            return
        queue.swap(fresh)
        self._spec, self._began_s = spec, time.monotonic()
        self._swaps += counts

    def in_charge(self) -> PolicyInCharge | None:
        """Return the active strategy with its statistics; None if none of ours is active."""
        queue = self._queue()
        if queue is None:
            return None
        report = queue.report(swaps=self._swaps, in_charge_s=round(time.monotonic() - self._began_s, 3))
        if queue.failed:
            return PolicyInCharge(kind=SCHEDULE, name=queue.strategy, params={}, schedule=report)
        return PolicyInCharge(
            kind=SCHEDULE,
            name=queue.strategy,
            params=dict(self._spec.parameters),
            effective_params=dict(STRATEGIES[self._spec.name].values(self._spec.parameters)),
            schedule=report,
        )
