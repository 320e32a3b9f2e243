"""Names of the gateway's tenants as engines account for them."""

import os
from collections.abc import Mapping
from typing import Final

from pydantic import ValidationError

from gateway.admission import Authenticator, keys_of
from gateway.errors import AuthenticationError, StateError
from gateway.settings import ApiKeySettings
from gateway.state import load_salt_secret
from kvcontrol.core.tenant import tenant_of_salt
from kvgate.failure import CommandError
from kvgate.up.stack import GatewayOptions

_SALTED_BY: Final = "KVGATE_SALT_SECRET"


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
