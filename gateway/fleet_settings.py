"""Settings about where instances come from that have parts of their own, and where they may be."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMES: tuple[Literal["http"], Literal["https"]] = ("http", "https")
PRIVATE_NETWORKS = ("127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


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


__all__ = ["PRIVATE_NETWORKS", "SCHEMES", "DnsSettings", "KubernetesSettings"]
