"""Every setting of the gateway, read from the environment and one YAML file."""

from gateway.settings.access import ANY_ORIGIN, ApiKeySettings
from gateway.settings.fleet import InstanceSettings
from gateway.settings.problems import PREFIX
from gateway.settings.settings import Settings, load_settings, setting_fields

__all__ = [
    "ANY_ORIGIN",
    "PREFIX",
    "ApiKeySettings",
    "InstanceSettings",
    "Settings",
    "load_settings",
    "setting_fields",
]
