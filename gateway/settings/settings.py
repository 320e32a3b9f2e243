"""Every setting of the gateway, with its unit and what is allowed.

Sources, strongest first: ``KVGATE_<NAME>`` environment variables, the YAML file of ``--config``, the defaults here.
Lists are JSON in the environment. An unknown key in either is an error that names it.
"""

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as SourceError

from gateway.errors import SettingsError
from gateway.http.endpoint import place_of
from gateway.settings.fleet import (
    PRIVATE_NETWORKS,
    SANE_NAME,
    SCHEMES,
    DnsSettings,
    InstanceSettings,
    KubernetesSettings,
)
from gateway.settings.problems import PREFIX, not_json, problem, read_yaml, unknown
from kvcontrol.core.roles import KVTransport

_OTHERS = (
    "KVGATE_ENGINE_",
    "KVGATE_UP_",
    "KVGATE_TEST_",
    "KVGATE_CACHE_",
    "KVGATE_MODEL_",
    "KVGATE_CONFIG",
    "KVGATE_PORT_RANGE",
)
"""Variables with these beginnings belong to other parts of kvgate and may stand in the same environment."""

ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._~\[\]:-]+")
_MIB = 1 << 20
_MIN_SECRET_CHARS = 16


def _default_state_dir() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kvgate"


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


Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Settings(BaseSettings):
    """The gateway's settings; use ``load_settings`` so that errors name where a value came from."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="Address to listen on. Without API keys only a loopback one is allowed.")
    port: int = Field(8000, ge=0, le=65_535, description="Port to listen on; 0 picks a free one.")
    instances: tuple[InstanceSettings, ...] = Field(
        (), description="Engine instances: a list of {id, url}, with a role where it isn't their own."
    )
    tokenizer: Path | None = Field(
        None,
        description="Model folder with tokenizer and chat template; without it no text is routed by announced blocks.",
    )
    tokenizer_memory_bytes: int = Field(
        64 * _MIB, ge=0, le=1 << 36, description="Memory for texts that were tokenized before, in bytes."
    )
    state_dir: Path = Field(default_factory=_default_state_dir, description="Folder for what must survive a restart.")
    isolation: Literal["allow", "strict"] = Field(
        "allow",
        description="Whether an engine that keeps no tenants' cached prefixes apart is used (and warned of) where "
        "there are several tenants, or not.",
    )
    salt_secret: SecretStr | None = Field(
        None,
        description="Secret that tenant salts are derived from, at least 16 characters; otherwise kept in state_dir.",
    )
    api_keys: tuple[ApiKeySettings, ...] = Field(
        (), description="A list of {key, tenant}; without any key, here or in the store, any key is accepted."
    )
    require_keys: bool = Field(
        default=False, description="Whether requests without a known API key are refused even while there is none yet."
    )
    cors_origins: tuple[str, ...] = Field(
        (),
        description='Origins whose pages may use the inference routes, like https://chat.example.com; "*" allows all, '
        "and needs API keys. Their host names count as names of this gateway.",
    )
    workers: int = Field(
        1,
        ge=1,
        le=256,
        description="Processes that share the address, one for each core; more than one needs redis_url.",
    )
    admin_key: SecretStr | None = Field(
        None,
        description="Key of /admin/v1, at least 16 characters and no tenant's; otherwise made and kept in state_dir.",
    )
    operator_access: Literal["auto", "open", "key"] = Field(
        "auto",
        description="Who may read /metrics, /dashboard/fleet and the instances of /readyz: open (everybody), key (with "
        "metrics_key or the admin key), auto (open on a loopback address, key on any other).",
    )
    metrics_key: SecretStr | None = Field(
        None, description="Key for Prometheus: it opens what operator_access names and nothing else; 16 characters."
    )
    store_url: SecretStr | None = Field(
        None,
        description="PostgreSQL for what several hosts share (postgresql://...); otherwise SQLite in state_dir.",
    )
    store_poll_s: Seconds = Field(
        1.0, description="How often a gateway looks whether another one changed tenants, keys or quotas, in seconds."
    )
    store_timeout_s: Seconds = Field(
        5.0,
        description="Longest wait of a call to the store, and longest time for the call itself, in seconds; then its "
        "connection is cut and nothing was changed.",
    )
    store_trust_s: Seconds = Field(
        3600.0,
        description="How long stored keys are accepted while the store can't be read, in seconds; then they are "
        "answered 503. Keys of the settings are always accepted.",
    )
    audit_entries: int = Field(100_000, ge=1, le=10**9, description="Newest entries of the audit log that are kept.")
    audit_days: float = Field(365.0, gt=0, le=36_500, description="Days that an entry of the audit log is kept.")
    redis_url: SecretStr | None = Field(
        None,
        description="Redis or Valkey for quotas and leases that gateways share (redis://host:port/0); "
        "without it, each has its own.",
    )
    routing_policy: Literal["cost_aware", "prefix_affinity", "consistent_hash", "least_load", "round_robin"] = Field(
        "cost_aware", description="How instances are chosen."
    )

    instance_schemes: tuple[Literal["http", "https"], ...] = Field(
        SCHEMES, description="Schemes that instances may have which the settings don't name themselves."
    )
    instance_networks: tuple[str, ...] = Field(
        PRIVATE_NETWORKS, description="Networks (CIDR) that such instances may be in; never link-local ones."
    )
    drain_timeout_s: Seconds = Field(
        300.0, description="Longest time for a leaving instance to finish what it has, in seconds."
    )
    registration_key: SecretStr | None = Field(
        None, description="Key with which instances may register themselves, at least 16 characters; or the admin key."
    )
    discovery_interval_s: Seconds = Field(2.0, description="Pause between two looks at file and DNS, in seconds.")
    discovery_loss_s: Seconds = Field(
        30.0,
        description="How long a file, DNS or Kubernetes must have named fewer than half of its instances before the "
        "others are drained, in seconds.",
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

    max_body_bytes: int = Field(64 * _MIB, ge=1024, le=1 << 30, description="Longest request body, in bytes.")
    body_memory_bytes: int = Field(
        1 << 30,
        ge=2048,
        le=1 << 40,
        description="Memory for the bodies of all requests, in bytes, at least twice max_body_bytes; a tenant may hold "
        "as much of it as is free, and beyond that gets 429.",
    )
    max_header_bytes: int = Field(
        64 << 10, ge=4096, le=1 << 24, description="Longest request line and headers together, in bytes."
    )
    header_timeout_s: Seconds = Field(
        20.0, description="Longest time for a client to send a request's line and headers, in seconds."
    )
    body_timeout_s: Seconds = Field(60.0, description="Longest time for a client to send its body, in seconds.")
    keep_alive_timeout_s: Seconds = Field(
        75.0,
        description="Time that an idle connection of a client is kept, in whole seconds: longer than a load balancer "
        "keeps its own, mostly 60 s.",
    )
    send_timeout_s: Seconds = Field(
        60.0, description="Longest time for a client to take a piece of its answer, in seconds."
    )
    request_timeout_s: Seconds = Field(
        3600.0, description="Longest time for a request, from its arrival to the last byte of its answer, in seconds."
    )
    connect_timeout_s: Seconds = Field(5.0, description="Longest time to connect to an instance, in seconds.")
    first_byte_timeout_s: Seconds = Field(
        600.0, description="Longest wait for the first byte of an instance's answer (queue and prefill), in seconds."
    )
    idle_timeout_s: Seconds = Field(120.0, description="Longest silence within an answer, in seconds.")
    stream_ping_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="Silence after which a stream's client is sent a comment (Messages: a ping), in seconds; 0: never.",
    )
    max_attempts: int = Field(3, ge=1, le=16, description="Instances that one request is tried on at most.")
    max_answers: int = Field(
        128,
        ge=1,
        le=4096,
        description="Answers that one request may ask for, prompts times n or best_of; more are refused with 400.",
    )
    retry_budget_ratio: float = Field(
        0.2, ge=0, le=1, description="Retries allowed per request on average, so that an outage is not multiplied."
    )
    health_interval_s: Seconds = Field(1.0, description="Pause between two health checks of an instance, in seconds.")
    health_timeout_s: Seconds = Field(5.0, description="Longest time for a health check, in seconds.")
    breaker_failures: int = Field(
        5, ge=1, le=1000, description="Requests failed in a row by an instance that keep others away from it."
    )
    breaker_pause_s: Seconds = Field(
        1.0, description="First such pause, in seconds; it doubles up to 30 s with each failed trial."
    )
    unhealthy_after: int = Field(
        3, ge=1, le=100, description="Failed health checks in a row that take an instance out."
    )
    panic_threshold: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of well instances below which those whose health checks only time out stay twice as long.",
    )
    model_memory_s: float = Field(
        300.0,
        ge=0,
        le=86_400,
        description="How long a model whose instance has left gets 503 instead of 404, in seconds.",
    )
    shutdown_notice_s: float = Field(
        1.0,
        ge=0,
        le=86_400,
        description="Time after a stop signal in which requests are still served while /readyz is 503, in seconds; "
        "then new connections are refused.",
    )
    shutdown_grace_s: Seconds = Field(
        10.0, description="Time for running requests to end after a stop signal, in seconds."
    )

    control_timeout_s: Seconds = Field(
        10.0, description="Longest time for an instance to take over a policy, a KV budget or a reset, in seconds."
    )
    expected_output_tokens: int = Field(
        256, ge=1, le=1 << 20, description="Tokens reserved for an answer whose request doesn't bound it."
    )
    queue_length: int = Field(1024, ge=0, le=1 << 16, description="Requests that may wait for one model.")
    queue_ageing_s: Seconds = Field(10.0, description="Waiting time that lifts a request by one priority, in seconds.")
    queue_interactive_s: Seconds = Field(10.0, description="Longest wait of the SLO class interactive, in seconds.")
    queue_standard_s: Seconds = Field(60.0, description="Longest wait of the SLO class standard, in seconds.")
    queue_batch_s: Seconds = Field(600.0, description="Longest wait of the SLO class batch, in seconds.")
    max_instance_requests: int = Field(
        4096,
        ge=1,
        le=1 << 16,
        description="Most requests at one instance; below it the limit follows what it can take.",
    )
    slow_first_byte_s: Seconds = Field(
        60.0, description="A first byte later than this lowers the limit of its instance, in seconds."
    )

    pd_min_uncached_tokens: int = Field(
        1024,
        ge=1,
        le=1 << 30,
        description="Uncached tokens of a prompt from which on a prefill instance computes it.",
    )
    pd_transports: tuple[KVTransport, ...] = Field(
        tuple(KVTransport),
        description="Ways for KV from prefill to decode instances, the first that both have is taken.",
    )
    prefill_max_requests: int = Field(
        0, ge=0, le=1 << 16, description="Prompts that one prefill instance computes at once; 0: no limit."
    )
    prefill_max_tokens: int = Field(
        0,
        ge=0,
        le=1 << 30,
        description="Uncached tokens that one prefill instance computes at once, one longer prompt aside; 0: no limit.",
    )
    decode_max_requests: int = Field(
        0, ge=0, le=1 << 16, description="Requests that one decode instance has at once; 0: no limit of its own."
    )
    prefill_tokens_per_s: float = Field(
        2000.0, gt=0, description="Prefill speed of an instance in tokens per second, assumed until it is measured."
    )
    decode_load_s: float = Field(
        0.02,
        ge=0,
        description="Delay that each running request adds to a new one, in seconds, assumed until it is measured.",
    )
    routing_spread: float = Field(
        0.1,
        ge=0,
        le=10,
        description="Share of the uncached work that an instance got lately which counts against it in its cost.",
    )
    learned_capacity_tokens: int = Field(
        1 << 20,
        ge=1024,
        le=1 << 32,
        description="Tokens that an engine without KV events is believed to cache at most, before its answers tell.",
    )
    route_memory_s: float = Field(
        10.0,
        ge=0,
        le=600,
        description="How long a fresh routing decision attracts siblings before KV events confirm it.",
    )
    session_memory_s: float = Field(
        3600.0,
        ge=0,
        le=86_400,
        description="How long a prompt that engines' events can't confirm attracts its next turns, in seconds.",
    )

    otlp_endpoint: str | None = Field(
        None,
        description="OpenTelemetry collector (OTLP over HTTP, like http://127.0.0.1:4318) that is sent a trace of each "
        "request; or OTEL_EXPORTER_OTLP_ENDPOINT. Without one there are none.",
    )
    log_format: Literal["text", "json"] = Field("text", description="How log lines look.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least important level shown."
    )

    @field_validator("salt_secret", "admin_key", "registration_key", "metrics_key")
    @classmethod
    def _long_secret(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < _MIN_SECRET_CHARS:
            raise ValueError(f"a secret or key of the gateway has at least {_MIN_SECRET_CHARS} characters")
        return value

    @field_validator("instance_networks")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            try:
                ipaddress.ip_network(each)
            except ValueError as error:
                raise ValueError(f"a network looks like 10.0.0.0/8 or fd00::/8: {error}") from None
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            if each != ANY_ORIGIN and not _ORIGIN.fullmatch(each):
                raise ValueError(
                    f"{each!r} is no origin: a scheme and a host in lower case, maybe a port, and no path, like "
                    'https://chat.example.com; or "*"'
                )
        return value

    @field_validator("tokenizer")
    @classmethod
    def _folder(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_dir():
            raise ValueError("the tokenizer is a folder that exists, as saved with a Hugging Face model")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for what, values in (
            ("instance id", [instance.id for instance in self.instances]),
            ("instance url", [place_of(instance.url) for instance in self.instances]),
            ("API key", [key.key.get_secret_value() for key in self.api_keys]),
        ):
            if len(set(values)) != len(values):
                raise ValueError(f"each {what} may appear once")
        if self.body_memory_bytes < 2 * self.max_body_bytes:
            raise ValueError(
                f"body_memory_bytes is at least twice max_body_bytes ({self.max_body_bytes}): a tenant may hold as "
                "much as is free, so the longest body would never fit"
            )
        if self.workers > 1 and self.redis_url is None:
            raise ValueError(
                f"{self.workers} workers would each grant every quota: set redis_url, so that they share them"
            )
        if ANY_ORIGIN in self.cors_origins and self.open_mode:
            raise ValueError(
                'cors_origins "*" without API keys: any page that a browser on this machine shows could use the '
                "gateway. Set api_keys or require_keys, or name the origins"
            )
        if self.admin_key in [key.key for key in self.api_keys]:
            raise ValueError("admin_key is one of the api_keys; a tenant must not be able to change the others")
        if self.metrics_key in [self.admin_key or "", *(key.key for key in self.api_keys)]:
            raise ValueError("metrics_key is the admin_key or one of the api_keys; give Prometheus a key of its own")
        if not self.api_keys and not self.require_keys and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} is not a loopback address and no api_keys are set: anyone on the network could "
                "use the gateway. Set api_keys or require_keys, or listen on 127.0.0.1"
            )
        return self

    @property
    def operators_open(self) -> bool:
        """Whether operators' data is shown without a key."""
        return self.operator_access == "open" or (self.operator_access == "auto" and is_loopback(self.host))

    @property
    def open_mode(self) -> bool:
        """Whether any API key is accepted until the store has one."""
        return not self.api_keys and not self.require_keys

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        del settings_cls, dotenv_settings, file_secret_settings
        return env_settings, init_settings


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_settings(config: Path | None = None) -> Settings:
    """Read file and environment; raises ``SettingsError`` with one line for each problem."""
    values = {} if config is None else read_yaml(config)
    known = Settings.model_fields
    problems = [unknown(str(config), key, key, list(known)) for key in values if key not in known]
    variables = {f"{PREFIX}{name.upper()}" for name in known}
    problems += [
        unknown("environment", name, name.upper(), sorted(variables))
        for name in os.environ
        if name.upper().startswith(PREFIX) and not name.startswith(_OTHERS) and name.upper() not in variables
    ]
    if problems:
        raise SettingsError("\n".join(problems))
    try:
        return Settings(**values)
    except ValidationError as error:
        raise SettingsError("\n".join(problem(detail, config) for detail in error.errors())) from None
    except SourceError as error:
        raise SettingsError(not_json(error)) from None


__all__ = ["PREFIX", "ApiKeySettings", "InstanceSettings", "Settings", "is_loopback", "load_settings"]
