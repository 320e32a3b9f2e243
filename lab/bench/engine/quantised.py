"""LMDeploy's own name of how an engine stores KV."""

from typing import Any

from kvcontrol.core.quantisation import KVQuantisation


def policy_of(quantisation: str) -> Any:
    """Return the ``QuantPolicy`` of a ``KVQuantisation``."""
    from lmdeploy.messages import QuantPolicy

    return QuantPolicy[KVQuantisation(quantisation).name]
