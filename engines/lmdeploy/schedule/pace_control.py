"""Which pace an engine's steps follow: shown, and swapped between two steps of the engine."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engines.control.errors import RefusedError
from engines.control.policies import PACE
from engines.control.policy_changes import pace_of
from engines.lmdeploy.schedule.pacing import Pacer, pacer_of
from engines.lmdeploy.settings import EngineSettings
from kvcontrol.core.policy_control import PolicyChange, PolicyInCharge, PolicyParams
from kvcontrol.kv_policy.spec import PolicySpec, parse_spec
from kvcontrol.scheduler_ir.pacing import ALTERNATE, DEFAULT_TARGET_MS, ENGINE_PACE, ITL_TARGET, PACES, make_pace


class PaceControl:
    """One engine's; swaps on the engine's thread, ``in_charge`` on any."""

    kind = PACE
    available: Mapping[str, str] = {name: kind.summary for name, kind in PACES.items()}

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._spec = PolicySpec(text=ENGINE_PACE, name=ENGINE_PACE, parameters={})
        self._began_s = time.monotonic()
        self._swaps = 0

    @property
    def is_possible(self) -> bool:
        """Whether this engine chooses between prompts and answers, and alone."""
        config = self._engine.engine_config
        return config.role.name != "Prefill" and int(config.dp) == 1

    def spec_of(self, change: PolicyChange) -> PolicySpec:
        """Return the pace that a change names; raises ``RefusedError`` or ``PolicyError``."""
        return pace_of(change)

    def swap(self, spec: PolicySpec, *, counts: bool) -> None:
        """Put a pace in charge; nothing has changed when it raises ``PolicyError`` or ``RefusedError``.

        Nothing happens when it is in charge already: a client that didn't get the answer may ask again.
        """
        pace = make_pace(spec.name, spec.parameters)
        pacer = self._pacer()
        if pace is not None and not self.is_possible:
            raise RefusedError(
                "this engine can't be paced: it only computes prompts, or is one of a data-parallel group; "
                f"allowed is {ENGINE_PACE}"
            )
        if pacer is None:
            raise RefusedError("kvgate's pace is not active in this engine: LMDeploy's own rule chooses steps")
        values, present = PACES[spec.name].values, self._spec
        if not pacer.failed and present.name == spec.name and values(present.parameters) == values(spec.parameters):
            return
        pacer.swap(pace)
        self._spec, self._began_s = spec, time.monotonic()
        self._swaps += counts

    def in_charge(self) -> PolicyInCharge | None:
        """Return the active pace with its statistics; None if none of ours is active."""
        pacer = self._pacer()
        if pacer is None:
            return None
        report = pacer.report(swaps=self._swaps, in_charge_s=round(time.monotonic() - self._began_s, 3))
        if pacer.failed:
            return PolicyInCharge(kind=PACE, name=ENGINE_PACE, params={}, pace=report)
        params: PolicyParams = dict(self._spec.parameters)
        effective: PolicyParams = dict(PACES[self._spec.name].values(self._spec.parameters))
        return PolicyInCharge(kind=PACE, name=self._spec.name, params=params, effective_params=effective, pace=report)

    def _pacer(self) -> Pacer | None:
        return pacer_of(self._engine.scheduler)


def pace_of_settings(settings: EngineSettings, *, on_gpu: bool) -> PolicySpec:
    """Return an engine's initial pace: the setting, else a target on a GPU, else a decode step after each prefill."""
    target_ms = settings.itl_target_ms
    if settings.pace is not None:
        choice = parse_spec(settings.pace)
        if choice.name == ITL_TARGET and target_ms:
            return replace(choice, parameters={"itl_target_ms": target_ms, **choice.parameters})
        return choice
    if target_ms is None:
        target_ms = DEFAULT_TARGET_MS if on_gpu else 0.0
    if not target_ms:
        return PolicySpec(text=ALTERNATE, name=ALTERNATE, parameters={})
    return PolicySpec(text=ITL_TARGET, name=ITL_TARGET, parameters={"itl_target_ms": target_ms})
