"""The transports of a prompt's blocks between engines."""

from typing import Final

from engines.lmdeploy.settings import EngineSettings, PdTransport, SettingsError
from kvcontrol.core.pd import parse_endpoint

_ANY_HOST: Final = ("0.0.0.0", "::", "*")  # noqa: S104 - compared, not bound


def transport_of(settings: EngineSettings, device: str) -> PdTransport:
    """Return the configured transport, or the default of ``device``; raises ``SettingsError`` for invalid ones."""
    if settings.pd_transport is None:
        return PdTransport.TCP if device == "cpu" else PdTransport.NATIVE
    if settings.pd_transport is PdTransport.TIERS:
        raise SettingsError(
            "KVGATE_ENGINE_PD_TRANSPORT=tiers is for hybrid instances: in LMDeploy's other roles an engine has no KV "
            "connector; omit --role and set the prefill instances in the gateway's settings"
        )
    if settings.pd_transport is PdTransport.TCP and device != "cpu":
        raise SettingsError(
            f"KVGATE_ENGINE_PD_TRANSPORT=tcp moves host memory, and this engine's KV cache is on {device}; "
            "allowed is native (LMDeploy's DLSlime or Mooncake, see --migration-backend)"
        )
    return settings.pd_transport


def endpoint_of(settings: EngineSettings, port: int) -> str:
    """Return where others reach what this instance serves on ``port``; raises ``SettingsError`` for what is nowhere."""
    host = settings.pd_advertised_host or settings.pd_host
    endpoint = f"{host}:{port}"
    if host.strip("[]") in _ANY_HOST or parse_endpoint(endpoint) is None:
        raise SettingsError(
            f"{host!r} is no host that other instances can reach; KVGATE_ENGINE_PD_ADVERTISED_HOST is a name or an "
            "address of this one"
        )
    return endpoint
