"""Which strategy orders an engine's waiting queue: shown, and exchanged between two steps of the engine.

The new strategy takes over everybody who waits, in one call on the engine's thread; if that fails, the old one has
never stopped.
"""

import time
from typing import Any, Final

from engines.events.publisher import RefusedError
from engines.lmdeploy.schedule.scheduler import EngineQueue, queue_of
from kvcontrol.core.policy_control import PolicyInCharge, PolicyParams
from kvcontrol.kv_policy.spec import PolicySpec
from kvcontrol.scheduler_ir.strategies import STRATEGIES, make_strategy

SCHEDULE: Final = "schedule"


class ScheduleOperations:
    """One engine's; changes on the engine's thread, ``in_charge`` on any."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._choice = PolicySpec(text="fifo", name="fifo", parameters={})
        self._began_s = time.monotonic()
        self._swaps = 0

    def use(self, choice: PolicySpec, *, counts: bool) -> None:
        """Put a strategy in charge; nothing has changed when it raises ``PolicyError`` or ``RefusedError``.

        Nothing happens when it is in charge already: a client that didn't get the answer may ask again.
        """
        fresh = make_strategy(choice.name, choice.parameters)
        queue = self._queue()
        if queue is None:
            raise RefusedError("this engine has no waiting queue of ours: LMDeploy's order is in charge")
        values = STRATEGIES[choice.name].values
        present = self._choice
        if not queue.failed and present.name == choice.name and values(present.parameters) == values(choice.parameters):
            return
        queue.use(fresh)
        self._choice, self._began_s = choice, time.monotonic()
        self._swaps += counts

    def in_charge(self) -> PolicyInCharge | None:
        """Return what orders now, with its statistics; None where nothing of ours does."""
        queue = self._queue()
        if queue is None:
            return None
        report = queue.report(swaps=self._swaps, in_charge_s=round(time.monotonic() - self._began_s, 3))
        params: PolicyParams = {} if queue.failed else dict(self._choice.parameters)
        effective: PolicyParams = (
            {} if queue.failed else dict(STRATEGIES[self._choice.name].values(self._choice.parameters))
        )
        return PolicyInCharge(
            kind=SCHEDULE, name=queue.strategy, params=params, effective_params=effective, schedule=report
        )

    def _queue(self) -> EngineQueue | None:
        return queue_of(self._engine.scheduler)


__all__ = ["SCHEDULE", "ScheduleOperations"]
