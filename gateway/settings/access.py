"""Settings of access: keys of tenants and operators, origins of pages, and the secret of salts."""

import re
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from gateway.settings.section import SANE_NAME, Section

ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._~\[\]:-]+")
_MIN_SECRET_CHARS = 16


class ApiKeySettings(BaseModel):
    """An API key and the tenant it belongs to; several keys may share a tenant (and its cached blocks)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: SecretStr
    tenant: str

    @field_validator("key")
    @classmethod
    def _not_empty(cls, value: SecretStr) -> SecretStr:
        if not value.get_secret_value().strip():
            raise ValueError("an API key is not empty")
        return value

    @field_validator("tenant")
    @classmethod
    def _sane_tenant(cls, value: str) -> str:
        if not SANE_NAME.fullmatch(value):
            raise ValueError("a tenant is 1 to 64 of A-Z a-z 0-9 . _ - and starts with a letter or digit")
        return value


class AccessSettings(Section):
    """Who may use the gateway: keys of tenants and operators, origins of pages, and the secret of salts."""

    api_keys: tuple[ApiKeySettings, ...] = Field(
        (), description="A list of {key, tenant}; without any key, here or in the store, any key is accepted."
    )
    require_keys: bool = Field(
        default=False,
        description="Whether requests without a known API key are refused before the first key exists.",
    )
    admin_key: SecretStr | None = Field(
        None,
        description="Key of /admin/v1, at least 16 characters and no tenant's; otherwise made and kept in state_dir.",
    )
    registration_key: SecretStr | None = Field(
        None, description="Key with which instances may register themselves, at least 16 characters; or the admin key."
    )
    metrics_key: SecretStr | None = Field(
        None, description="Key for Prometheus: it opens what operator_access names and nothing else; 16 characters."
    )
    operator_access: Literal["auto", "open", "key"] = Field(
        "auto",
        description="Access to /metrics, /dashboard/fleet and the instances of /readyz: open (everybody), key (with "
        "metrics_key or the admin key), auto (open on a loopback address, key on any other).",
    )
    cors_origins: tuple[str, ...] = Field(
        (),
        description='Origins whose pages may use the inference routes, like https://chat.example.com; "*" allows all, '
        "and needs API keys. Their host names count as names of this gateway.",
    )
    salt_secret: SecretStr | None = Field(
        None,
        description="Secret that tenant salts are derived from, at least 16 characters; otherwise kept in state_dir.",
    )

    @field_validator("salt_secret", "admin_key", "registration_key", "metrics_key")
    @classmethod
    def _long_secret(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < _MIN_SECRET_CHARS:
            raise ValueError(f"a secret or key of the gateway has at least {_MIN_SECRET_CHARS} characters")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            if each != ANY_ORIGIN and not _ORIGIN.fullmatch(each):
                raise ValueError(
                    f"{each!r} is not an origin; an origin is a scheme and a host in lower case, with a port where "
                    'needed, like https://chat.example.com; or "*"'
                )
        return value

    @model_validator(mode="after")
    def _separate_keys(self) -> Self:
        keys = [each.key for each in self.api_keys]
        if len({each.get_secret_value() for each in keys}) != len(keys):
            raise ValueError("each API key may appear once")
        if ANY_ORIGIN in self.cors_origins and self.open_mode:
            raise ValueError(
                'cors_origins "*" without API keys: any page that a browser on this machine shows could use the '
                "gateway. Set api_keys or require_keys, or name the origins"
            )
        if self.admin_key in keys:
            raise ValueError("admin_key is one of the api_keys; a tenant must not be able to change the others")
        if self.metrics_key in [self.admin_key or "", *keys]:
            raise ValueError("metrics_key is the admin_key or one of the api_keys; give Prometheus a key of its own")
        return self

    @property
    def open_mode(self) -> bool:
        """Whether any API key is accepted until the store has one."""
        return not self.api_keys and not self.require_keys
