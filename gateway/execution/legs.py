"""Carries out the legs of a plan that come before its answer; of a hybrid plan that is none.

Each kind of leg has a runner; it is given the call that is going to be made to the answering instance and returns it as
it is to be made after this leg (with a header that says where the KV is, for instance). A runner that is cancelled, or
raises, has let go of what it held. Which legs there are is the plan's affair: nobody here asks what kind of plan it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.http.headers import Header
from gateway.placement.planner import Plan
from gateway.registry import Instance, LoadTracker
from gateway.types import Operation, RequestId
from gateway.upstream import FailureKind, Opening, UpstreamFailureError
from kvcontrol.core.ids import InstanceId
from kvcontrol.scheduler_ir import Leg, LegKind


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """The request as an instance is going to be sent it, at ``path`` below its URL. ``opening`` is its client's, where
    that waits for a stream.
    """

    operation: Operation
    path: bytes
    request_id: RequestId
    headers: Sequence[Header]
    body: bytes
    opening: Opening | None = None


class LegFailedError(UpstreamFailureError):
    """A leg before the answer failed at ``instance``."""

    def __init__(self, kind: FailureKind, message: str, *, instance: Instance) -> None:
        super().__init__(kind, message)
        self.instance = instance


class LegRunner(Protocol):
    """What carries out one kind of leg."""

    async def run(self, leg: Leg, instance: Instance, call: EngineCall) -> EngineCall:
        """Carry out a leg at ``instance`` and return the answering call as it is after it; raises
        ``UpstreamFailureError``.
        """
        ...


class LegExecutor:
    """Runs legs in their order, and counts each at its instance while it runs."""

    def __init__(self, *, load: LoadTracker, runners: Mapping[LegKind, LegRunner]) -> None:
        self._load = load
        self._runners = dict(runners)

    async def before_answer(self, plan: Plan, call: EngineCall) -> EngineCall:
        """Run the legs before a plan's answer; raises ``LegFailedError``."""
        for leg in plan.execution.before_answer:
            call = await self._run(leg, plan, call)
        return call

    async def _run(self, leg: Leg, plan: Plan, call: EngineCall) -> EngineCall:
        instance = plan.others[InstanceId(leg.device)]
        runner = self._runners.get(leg.kind)
        if runner is None:
            raise LegFailedError(
                FailureKind.CONNECT, f"this gateway can't carry out a {leg.kind} leg", instance=instance
            )
        tokens = plan.elsewhere_tokens if leg.kind is LegKind.PREFILL else 0
        try:
            with self._load.placed(instance.id, uncached_tokens=tokens, cold=False):
                return await runner.run(leg, instance, call)
        except UpstreamFailureError as failure:
            raise LegFailedError(failure.kind, str(failure), instance=instance) from failure
