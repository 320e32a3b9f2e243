"""Every setting of the gateway, read from the environment and one YAML file."""

from gateway.settings.settings import (
    ANY_ORIGIN,
    PREFIX,
    ApiKeySettings,
    InstanceSettings,
    Settings,
    is_loopback,
    load_settings,
)

__all__ = ["ANY_ORIGIN", "PREFIX", "ApiKeySettings", "InstanceSettings", "Settings", "is_loopback", "load_settings"]
