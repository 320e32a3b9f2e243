"""The policies of one engine as ``/kv/v1/policy`` has them: shown, and swapped between two steps of the engine.

A change is checked as a whole before the engine hears of it: one that can't be done costs the engine nothing, and is
refused also while the engine is busy.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import msgspec

from engines.control.calls import CALL_TIMEOUT_S, CallEngine
from engines.control.errors import RefusedError
from engines.control.eviction import EngineCache, EvictionControl, kind_of
from engines.control.fences import Fences
from engines.control.operations import POLICY, SET_POLICY, Operation
from engines.control.policy_changes import change_of, policy_of
from engines.control.schedule import SCHEDULE
from engines.control.shadows import check_shadow, shadow_body, shadows_of
from kvcontrol.core.policy_control import FirstPolicy, PolicyChange, PolicyInCharge, PolicyReport
from kvcontrol.kv_policy import POLICIES, PolicyError, ShadowPolicies
from kvcontrol.kv_policy.spec import PolicySpec

SHADOW: Final = "shadow"
PACE: Final = "pace"


class PolicyKind(Protocol):
    """A kind of policy beside eviction, with one active policy for the whole engine."""

    kind: str
    available: Mapping[str, str]
    """Those that there are, each in a few words."""

    def spec_of(self, change: PolicyChange) -> PolicySpec:
        """Return the policy of a change; raises ``RefusedError`` or ``PolicyError``. Any thread."""

    def swap(self, spec: PolicySpec, *, counts: bool) -> None:
        """Put it in charge; nothing has changed when it raises ``RefusedError``. The engine's thread."""

    def in_charge(self) -> PolicyInCharge | None:
        """Return the active policy, None if none of ours is active. Any thread."""


class PolicyControl:
    """The policy operations of one engine; ``refused`` counts refused changes."""

    def __init__(
        self, cache: EngineCache, eviction: EvictionControl, call: CallEngine, others: Sequence[PolicyKind]
    ) -> None:
        self.eviction = eviction
        self.refused = 0
        self._cache = cache
        self._call = call
        self._others = {each.kind: each for each in others}
        self._fences = Fences()
        self._first: dict[str, FirstPolicy] = {}

    def table(self) -> dict[bytes, Operation]:
        """Return the operations by name."""
        return {
            POLICY: lambda _: msgspec.json.encode(self.report()),
            SET_POLICY: lambda body: msgspec.json.encode(self.swap(body)),
        }

    def report(self) -> PolicyReport:
        """Return the active and the available policies; any thread (numbers may be a moment apart)."""
        available = {kind: each.available for kind, each in self._others.items()}
        return PolicyReport(
            policies=self._in_charge(),
            available={name: kind.summary for name, kind in POLICIES.items()},
            strategies=dict(available.get(SCHEDULE, {})),
            paces=dict(available.get(PACE, {})),
            fences=self._fences.report(),
            first=dict(self._first),
        )

    def _in_charge(self) -> list[PolicyInCharge]:
        shadows = self._shadows()
        others = [found for each in self._others.values() if (found := each.in_charge()) is not None]
        shadow = PolicyInCharge(kind=SHADOW, name=",".join(shadows.candidates), params={}, shadow=shadow_body(shadows))
        return [*self.eviction.report(), shadow, *others]

    def swap(self, body: bytes) -> PolicyReport:
        """Carry out the change of a body; raises ``RefusedError``, and nothing has changed then."""
        try:
            self._swap(change_of(body))
        except PolicyError as error:
            self.refused += 1
            raise RefusedError(str(error)) from error
        except RefusedError:
            self.refused += 1
            raise
        return self.report()

    def watch(self, candidates: str) -> None:
        """Let shadow policies follow from now on, as they are written; the engine's thread."""
        self._watch(self._shadows_of(candidates))

    def _swap(self, change: PolicyChange) -> None:
        if (other := self._others.get(change.kind)) is not None:
            self._admit(change.kind, change)
            self._between_steps(partial(other.swap, other.spec_of(change), counts=True))
        elif change.kind == SHADOW:
            self._admit(change.kind, change)
            check_shadow(change)
            self._between_steps(partial(self._watch, self._shadows_of(change.name)))
        elif change.kind in (kinds := self.eviction.kinds()):
            tier = self.eviction.tier_of(change)
            self._admit(kind_of(tier), change)
            self.eviction.swap(tier, policy_of(change))
        else:
            raise RefusedError(
                f"there are no policies of kind {change.kind!r}; this instance has "
                f"{', '.join((*kinds, SHADOW, *self._others))}"
            )

    def _admit(self, kind: str, change: PolicyChange) -> None:
        """Raise ``StaleFenceError`` for a change that is older than one that came before; remember the first policy."""
        if change.fence is not None:
            self._fences.accept(kind, change.fence)
        if kind not in self._first:
            found = next((each for each in self._in_charge() if each.kind == kind), None)
            if found is not None:
                self._first[kind] = FirstPolicy(name=found.name, params=found.params)

    def _shadows(self) -> ShadowPolicies:
        shadows = self._cache.shadows
        return ShadowPolicies((), capacity_blocks=1) if shadows is None else shadows

    def _shadows_of(self, candidates: str) -> ShadowPolicies:
        """Return shadow policies as they are written, which follow nothing yet; any thread, O(characters)."""
        return shadows_of(candidates, capacity_blocks=self._cache.capacity_blocks)

    def _watch(self, shadows: ShadowPolicies) -> None:
        """Follow these from now on; the same ones that follow already go on counting. The engine's thread."""
        present = self._cache.shadows
        if present is None or present.candidates != shadows.candidates:
            self._cache.watch(shadows)

    def _between_steps(self, work: partial[None]) -> None:
        self._call(work, timeout_s=CALL_TIMEOUT_S)
