"""By what a prompt's blocks go from one engine to another."""

from engines.lmdeploy.settings import EngineSettings, PdTransport, SettingsError


def transport_of(settings: EngineSettings, device: str) -> PdTransport:
    """Return what is set, or what fits ``device``; raises ``SettingsError`` for what can't be."""
    if settings.pd_transport is None:
        return PdTransport.TCP if device == "cpu" else PdTransport.NATIVE
    if settings.pd_transport is PdTransport.TIERS:
        raise SettingsError(
            "KVGATE_ENGINE_PD_TRANSPORT=tiers is for hybrid instances: in LMDeploy's other roles an engine has no KV "
            "connector; leave --role out, the gateway is told which instance prefills"
        )
    if settings.pd_transport is PdTransport.TCP and device != "cpu":
        raise SettingsError(
            f"KVGATE_ENGINE_PD_TRANSPORT=tcp moves host memory, and this engine's KV cache is on {device}; "
            "allowed is native (LMDeploy's DLSlime or Mooncake, see --migration-backend)"
        )
    return settings.pd_transport


__all__ = ["transport_of"]
