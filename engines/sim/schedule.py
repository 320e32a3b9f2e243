"""Which strategy orders a simulated engine's waiting queue: shown, and exchanged. At first that of any instance."""

import time
from typing import Final

from engines.sim.engine import SimEngine
from kvcontrol.core.policy_control import PolicyInCharge
from kvcontrol.kv_policy.spec import PolicySpec
from kvcontrol.scheduler_ir.strategies import DEFAULT_STRATEGY, STRATEGIES, make_strategy

SCHEDULE: Final = "schedule"


class SimSchedule:
    """Belongs to the engine's thread."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._choice = PolicySpec(text=DEFAULT_STRATEGY, name=DEFAULT_STRATEGY, parameters={})
        engine.queue.use(make_strategy(DEFAULT_STRATEGY))
        self._began_s = time.monotonic()
        self._swaps = 0

    def use(self, choice: PolicySpec) -> None:
        """Put a strategy in charge of all that wait, from the engine's next event on, if it isn't already.

        Nothing has changed when it raises ``PolicyError``.
        """
        fresh = make_strategy(choice.name, choice.parameters)
        values, present = STRATEGIES[choice.name].values, self._choice
        if present.name == choice.name and values(present.parameters) == values(choice.parameters):
            return
        self._engine.queue.use(fresh)
        self._choice, self._began_s = choice, time.monotonic()
        self._swaps += 1

    def in_charge(self) -> PolicyInCharge:
        """Return what orders now, with its statistics."""
        choice = self._choice
        in_charge_s = round(time.monotonic() - self._began_s, 3)
        return PolicyInCharge(
            kind=SCHEDULE,
            name=self._engine.queue.strategy,
            params=dict(choice.parameters),
            effective_params=dict(STRATEGIES[choice.name].values(choice.parameters)),
            schedule=self._engine.queue.report(self._engine.now_s, swaps=self._swaps, in_charge_s=in_charge_s),
        )


__all__ = ["SCHEDULE", "SimSchedule"]
