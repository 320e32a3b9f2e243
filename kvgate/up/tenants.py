"""What a preset's quotas become: shares of the tiers for tenants that are known when engines start."""

import os
from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import ValidationError

from gateway.admission import Authenticator, keys_of
from gateway.errors import AuthenticationError, StateError
from gateway.settings import ApiKeySettings
from gateway.state import load_salt_secret
from kvcontrol.core.tenant import tenant_of_salt
from kvcontrol.presets import Preset
from kvgate.engine.tiers import TenantShares
from kvgate.failure import CommandError
from kvgate.up.stack import GatewayOptions

_SALTED_BY: Final = "KVGATE_SALT_SECRET"
_LEAST_TENANTS: Final = 2
_ROUNDING: Final = 1e-9


def tenants_of_keys(options: GatewayOptions, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return how engines call the tenants of the gateway's API keys; none where any key is accepted.

    Makes the secret of their salts where there is none yet. Raises ``CommandError`` when it can't be had.
    """
    if not options.api_keys:
        return ()
    given = environment.get(_SALTED_BY)
    try:
        secret = given.encode() if given else load_salt_secret(options.state_dir)
        keys = [ApiKeySettings.model_validate({"key": each.key, "tenant": each.tenant}) for each in options.api_keys]
        authenticator = Authenticator(keys, salt_secret=secret)
        salts = [
            authenticator.authenticate(keys_of([(b"x-api-key", each.key.encode())])).salt for each in options.api_keys
        ]
    except StateError as error:
        raise CommandError(str(error)) from error
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise CommandError(
            f"an API key is invalid: {why}", "write KEY or TENANT:KEY, for example acme:sk-123"
        ) from None
    except AuthenticationError:
        raise CommandError("an API key begins or ends with a space", "remove the space") from None
    return tuple(dict.fromkeys(map(tenant_of_salt, salts)))


def shares_of_preset(preset: Preset, tenants: Sequence[str] | None) -> tuple[TenantShares, list[str]]:
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


__all__ = ["shares_of_preset", "tenants_of_keys"]
