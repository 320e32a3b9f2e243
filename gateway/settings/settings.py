"""All settings of the gateway, with units and bounds.

Sources, strongest first: ``KVGATE_<NAME>`` environment variables, the YAML file of ``--config``, the defaults of the
sections. Names are flat in both sources and each belongs to one section. Lists are JSON in the environment. An unknown
key in either source is an error that names it.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from gateway.errors import SettingsError
from gateway.loopback import is_loopback
from gateway.settings.access import AccessSettings
from gateway.settings.admission import AdmissionSettings
from gateway.settings.fleet import FleetSettings
from gateway.settings.health import HealthSettings
from gateway.settings.problems import PREFIX, problem, read_yaml, unknown
from gateway.settings.requests import RequestSettings
from gateway.settings.routing import RoutingSettings
from gateway.settings.section import Section
from gateway.settings.separation import SeparationSettings
from gateway.settings.server import ServerSettings
from gateway.settings.state import StateSettings
from gateway.settings.telemetry import TelemetrySettings
from gateway.settings.upstream import UpstreamSettings

_OTHER_PREFIXES = (
    "KVGATE_ENGINE_",
    "KVGATE_UP_",
    "KVGATE_TEST_",
    "KVGATE_CACHE_",
    "KVGATE_MODEL_",
    "KVGATE_CONFIG",
    "KVGATE_PORT_RANGE",
)
"""Variables with these beginnings belong to other parts of kvgate and may stand in the same environment."""
_CLIENT_VARIABLES = frozenset({"KVGATE_API_KEY", "KVGATE_URL"})
"""Variables of the commands that call a gateway; a gateway starts beside them."""


class Settings(BaseModel):
    """All sections. It is made of flat values; use ``load_settings`` so that errors name where a value came from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    server: ServerSettings
    access: AccessSettings
    state: StateSettings
    fleet: FleetSettings
    requests: RequestSettings
    upstream: UpstreamSettings
    health: HealthSettings
    admission: AdmissionSettings
    routing: RoutingSettings
    separation: SeparationSettings
    telemetry: TelemetrySettings

    @model_validator(mode="before")
    @classmethod
    def _by_section(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Sort flat values into their sections; unknown ones stay, and are refused."""
        left = dict(values)
        sections = {}
        for name, section in _SECTIONS.items():
            sections[name] = {key: left.pop(key) for key in section.model_fields if key in left}
        return left | sections

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.server.workers > 1 and self.state.redis_url is None:
            raise ValueError(
                f"{self.server.workers} workers would each grant every quota: set redis_url, so that they share them"
            )
        if self.access.open_mode and not is_loopback(self.server.host):
            raise ValueError(
                f"host {self.server.host!r} is not a loopback address and no api_keys are set: anyone on the network "
                "could use the gateway. Set api_keys or require_keys, or listen on 127.0.0.1"
            )
        return self

    @property
    def operators_open(self) -> bool:
        """Whether operators' data is shown without a key."""
        access = self.access.operator_access
        return access == "open" or (access == "auto" and is_loopback(self.server.host))


_SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Settings.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


def setting_fields() -> dict[str, FieldInfo]:
    """Return every setting by its flat name."""
    return {name: field for section in _SECTIONS.values() for name, field in section.model_fields.items()}


def load_settings(config: Path | None = None) -> Settings:
    """Read file and environment; raises ``SettingsError`` with one line for each problem."""
    values = {} if config is None else read_yaml(config)
    known = setting_fields()
    problems = [unknown(str(config), key, key, list(known)) for key in values if key not in known]
    variables = {f"{PREFIX}{name.upper()}" for name in known}
    problems += [
        unknown("environment", name, name.upper(), sorted(variables))
        for name in os.environ
        if name.upper().startswith(PREFIX)
        and not name.startswith(_OTHER_PREFIXES)
        and name.upper() not in variables | _CLIENT_VARIABLES
    ]
    if problems:
        raise SettingsError("\n".join(problems))
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError(
            "\n".join(problem(detail, config, sections=_SECTIONS) for detail in error.errors())
        ) from None
