"""The role of an instance: set by an operator, by its source, or by its own report.

An engine in one of LMDeploy's own roles can be nothing else for its life, whatever anybody says; what a hybrid engine
is for is the gateway's affair alone, an operator's word going before the one that named it.
"""

from dataclasses import replace

from gateway.registry.instance import Instance, ProbeResult
from kvcontrol.core.control import InstanceStats
from kvcontrol.core.roles import EngineRole


def role_after(before: Instance, probe: ProbeResult) -> EngineRole:
    """Return what an instance is for after a good check; one that says nothing this once is what it was."""
    if probe.stats is None and probe.kv and before.life:
        return before.role
    return _role(probe.stats, before.assigned_role, before.named_role)


def with_assigned_role(before: Instance, role: EngineRole | None) -> Instance:
    """Return the same instance after an operator's word on what it is for; None takes that back."""
    return replace(before, assigned_role=role, role=_role(before.stats, role, before.named_role))


def _role(stats: InstanceStats | None, assigned_role: EngineRole | None, named_role: EngineRole | None) -> EngineRole:
    own = EngineRole.HYBRID if stats is None else stats.role
    return own if own is not EngineRole.HYBRID else assigned_role or named_role or own
