"""Settings about instances that have parts of their own: which there are, where they come from and may be."""

import re
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gateway.http.endpoint import usual
from kvcontrol.core.roles import EngineRole

SCHEMES: tuple[Literal["http"], Literal["https"]] = ("http", "https")
PRIVATE_NETWORKS = ("127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
SANE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What instances and tenants may be called."""

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class InstanceSettings(BaseModel):
    """One engine instance: a name that is stable over restarts, where its HTTP server listens, and what it is for where
    that is not what it says itself.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    url: str
    role: EngineRole | None = None

    @field_validator("id")
    @classmethod
    def _sane_id(cls, value: str) -> str:
        if not SANE_NAME.fullmatch(value):
            raise ValueError("an instance id is 1 to 64 of A-Z a-z 0-9 . _ - and starts with a letter or digit")
        return value

    @field_validator("url")
    @classmethod
    def _http_url(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("an instance url looks like http://127.0.0.1:9001")
        return usual(value.rstrip("/"))


class DnsSettings(BaseModel):
    """A DNS name whose addresses (``A``, with a ``port``) or SRV records are instances."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=253)
    record: Literal["A", "SRV"] = "A"
    port: int | None = Field(None, ge=1, le=65_535)
    scheme: Literal["http", "https"] = "http"

    @model_validator(mode="after")
    def _port_of_addresses(self) -> Self:
        if self.record == "A" and self.port is None:
            raise ValueError("records of type A say no port: set port, or ask for SRV records")
        return self


class KubernetesSettings(BaseModel):
    """A Kubernetes Service whose ready endpoints are instances."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    namespace: str = Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
    service: str = Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
    port: str | None = None
    scheme: Literal["http", "https"] = "http"
    api_url: str = "https://kubernetes.default.svc"
    token_file: Path | None = _ACCOUNT / "token"
    ca_file: Path | None = _ACCOUNT / "ca.crt"


__all__ = ["PRIVATE_NETWORKS", "SANE_NAME", "SCHEMES", "DnsSettings", "InstanceSettings", "KubernetesSettings"]
