"""Derives the desired state of the fleet from the store and the settings."""

import logging

from gateway.admission import Directory
from gateway.fleet.keeper import DesiredState
from gateway.fleet.policies import Policy
from gateway.state.bodies import DEFAULT_QUOTA
from gateway.types import TenantId
from kvcontrol.presets import Presets, UnknownPresetError

_log = logging.getLogger(__name__)


def desired_state_of(directory: Directory, presets: Presets, configured: frozenset[TenantId]) -> DesiredState:
    """Return the desired state of instances; ``configured`` are the tenants of the settings' keys."""
    shares = None
    whole = directory.whole
    if (chosen := directory.preset) is not None:
        try:
            shares = presets.preset(chosen.name, chosen.hardware).quota
        except UnknownPresetError as error:  # another version of kvgate knew it
            whole = False
            _log.warning("the preset of the fleet can't be kept: %s", error)
    tenants = directory.tenants | configured | frozenset(directory.limits)
    tenants -= {TenantId(DEFAULT_QUOTA)}
    return DesiredState(
        limits={tenant: directory.limits_of(tenant) for tenant in tenants},
        tenants=tenants,
        shares=shares,
        whole=whole,
        policies={
            kind: Policy(kind=kind, name=each.name, params=each.params) for kind, each in directory.policies.items()
        },
    )


__all__ = ["desired_state_of"]
