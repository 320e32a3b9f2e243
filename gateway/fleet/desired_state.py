"""Derives the desired state of the fleet from the store and the settings."""

from typing import Final

from gateway.admission import Directory
from gateway.fleet.keeper import DesiredState
from gateway.fleet.policies import Policy
from gateway.problems import ProblemKind, Problems
from gateway.state.bodies import DEFAULT_QUOTA
from gateway.types import TenantId
from kvcontrol.presets import Presets, UnknownPresetError

_SUBJECT: Final = "the preset of the fleet"


def desired_state_of(
    directory: Directory, presets: Presets, configured: frozenset[TenantId], problems: Problems
) -> DesiredState:
    """Return the desired state of instances; ``configured`` are the tenants of the settings' keys. A stored
    preset that this version does not know is one of the ``problems``.
    """
    shares = None
    unknown = ""
    if (chosen := directory.preset) is not None:
        try:
            shares = presets.preset(chosen.name, chosen.hardware).quota
        except UnknownPresetError as error:  # another version of kvgate knew it
            unknown = f"{error}; its quotas are not sent to instances: apply another one, or upgrade this gateway"
    problems.replace(ProblemKind.DOCUMENT, _SUBJECT, {_SUBJECT: unknown} if unknown else {})
    tenants = directory.tenants | configured | frozenset(directory.limits)
    tenants -= {TenantId(DEFAULT_QUOTA)}
    return DesiredState(
        limits={tenant: directory.limits_of(tenant) for tenant in tenants},
        tenants=tenants,
        shares=shares,
        whole=directory.whole and not unknown,
        policies={
            kind: Policy(kind=kind, name=each.name, params=each.params) for kind, each in directory.policies.items()
        },
    )
