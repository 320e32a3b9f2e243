"""The engine instances: which there are, where they come from, and how they leave."""

import ipaddress
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gateway.http.endpoint import endpoint_of, normalized_url
from gateway.settings.section import SANE_NAME, Seconds, Section
from kvcontrol.core.roles import EngineRole

SCHEMES: tuple[Literal["http"], Literal["https"]] = ("http", "https")
PRIVATE_NETWORKS = ("127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")

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
        return normalized_url(value.rstrip("/"))


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
            raise ValueError("A records contain no port: set port, or use SRV records")
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


class FleetSettings(Section):
    """The engine instances: which there are, where they come from, and how they leave."""

    instances: tuple[InstanceSettings, ...] = Field(
        (), description="Engine instances: a list of {id, url}, with a role if it differs from their own."
    )
    instance_schemes: tuple[Literal["http", "https"], ...] = Field(
        SCHEMES, description="Schemes that instances may have which the settings don't name themselves."
    )
    instance_networks: tuple[str, ...] = Field(
        PRIVATE_NETWORKS, description="Networks (CIDR) that such instances may be in; never link-local ones."
    )
    drain_timeout_s: Seconds = Field(300.0, description="Longest drain of a leaving instance, in seconds.")
    control_timeout_s: Seconds = Field(
        10.0, description="Longest time for an instance to take over a policy, a KV budget or a reset, in seconds."
    )
    auto_policy: bool = Field(
        default=False,
        description="Swap the eviction policy of HBM on all instances when a shadow policy is ahead by more than its "
        "noise, and back when that was wrong.",
    )
    auto_policy_dwell_s: Seconds = Field(
        3600.0, description="Shortest time from one automatic or manual swap to the next automatic one, in seconds."
    )
    shadow_period_s: Seconds = Field(
        60.0, description="Interval of comparing the shadow policies of all instances, in seconds."
    )
    discovery_interval_s: Seconds = Field(2.0, description="Interval of polling discovery file and DNS, in seconds.")
    discovery_loss_s: Seconds = Field(
        30.0,
        description="Window in which a file, DNS or Kubernetes may lose half of its instances, and how long a larger "
        "loss must last before the instances are drained, in seconds.",
    )
    discovery_file: Path | None = Field(
        None, description="YAML or JSON file with a list of {id, url}, read again when it changes."
    )
    discovery_dns: tuple[DnsSettings, ...] = Field(
        (), description="DNS names whose records are instances: a list of {name, record, port, scheme}."
    )
    discovery_dns_servers: tuple[str, ...] = Field(
        (), description="Name servers (host or host:port) to ask instead of the system's own."
    )
    discovery_kubernetes: KubernetesSettings | None = Field(
        None, description="A Service whose ready endpoints are instances: {namespace, service, port, scheme, ...}."
    )

    @property
    def discovers(self) -> bool:
        """Whether instances are looked for in a file, DNS or Kubernetes."""
        return self.discovery_file is not None or bool(self.discovery_dns) or self.discovery_kubernetes is not None

    @field_validator("instance_networks")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            try:
                ipaddress.ip_network(each)
            except ValueError as error:
                raise ValueError(f"a network looks like 10.0.0.0/8 or fd00::/8: {error}") from None
        return value

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        for what, values in (
            ("instance id", [instance.id for instance in self.instances]),
            ("instance url", [endpoint_of(instance.url) for instance in self.instances]),
        ):
            if len(set(values)) != len(values):
                raise ValueError(f"each {what} may appear once")
        return self
