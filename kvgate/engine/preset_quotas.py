"""What a preset's quotas become: shares of the tiers for tenants that are known when engines start."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvgate.engine.tiers import TenantShares

if TYPE_CHECKING:
    from kvcontrol.presets import Preset

_LEAST_TENANTS: Final = 2
_ROUNDING: Final = 1e-9


def shares_of_preset(preset: "Preset", tenants: Sequence[str] | None) -> tuple[TenantShares, list[str]]:
    """Return the shares that a preset asks for, and in words what of it isn't applied and why.

    ``tenants`` None is an engine that is started without its gateway, so that nobody's name is known.
    """
    burst, guaranteed = preset.quota.burst_share, preset.quota.guaranteed_share
    if tenants is not None and len(tenants) < _LEAST_TENANTS:
        if burst >= 1 and not guaranteed:
            return TenantShares(), []
        who = "one tenant has an API key" if tenants else "no API key names a tenant"
        return TenantShares(), [
            f"its quotas are not applied: {who}; quotas need several tenants (--api-key TENANT:KEY)"
        ]
    if not guaranteed:
        return TenantShares(burst=burst), []
    if tenants is None:
        why = "this engine knows no tenants at its start; set a guarantee with PUT /kv/v1/quotas"
    elif guaranteed * len(tenants) > 1 + _ROUNDING:
        why = f"{len(tenants)} tenants with that share exceed a tier; set guarantees with PUT /kv/v1/quotas"
    else:
        return TenantShares(burst=burst, guaranteed=guaranteed, tenants=tuple(tenants)), []
    return TenantShares(burst=burst), [f"quota.guaranteed_share ({guaranteed:g}) is not applied: {why}"]
