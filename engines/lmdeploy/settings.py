"""Our settings of an LMDeploy instance: ``KVGATE_ENGINE_*`` environment variables, which the engine's child inherits.

Everything here has a default, so that LMDeploy's own command line works with our hooks and nothing set.
"""

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from engines.events.log import DEFAULT_PENDING_BLOCKS, DEFAULT_REPLAY_BATCHES
from engines.lmdeploy.pd.networks import LOOPBACK, Network, parse_networks
from engines.models.cache import cache_dir
from kvcontrol import tracing
from kvcontrol.core.tenant import SHARED_TENANT
from kvcontrol.core.watermarks import Watermarks
from kvcontrol.core.write_mode import WriteMode
from kvcontrol.kv_policy import DEFAULT_POLICY, MigrationMode, ShadowPolicies
from kvcontrol.kv_policy.spec import parse_spec, parse_specs
from kvcontrol.scheduler_ir.pacing import ITL_TARGET, make_pace
from kvcontrol.scheduler_ir.strategies import DEFAULT_STRATEGY, make_strategy
from kvcontrol.tracing import Collector, TracingError

ENV_PREFIX = "KVGATE_ENGINE_"
MAX_IPC_PATH_BYTES = 100
"""Linux allows 107 bytes for a Unix socket's path; ZMQ needs a few."""


class PdTransport(StrEnum):
    """By what a prefill instance's blocks reach a decode instance: our TCP, LMDeploy's own GPU back ends, or the tiers
    below HBM, which a hybrid engine has.
    """

    TCP = "tcp"
    NATIVE = "native"
    TIERS = "tiers"


WRITE_BACK_HIGH = 0.95
WRITE_BACK_LOW = 0.9
_TENANT = re.compile(r"[0-9a-f]{16}")
_ROUNDING = 1e-9


class SettingsError(ValueError):
    """A setting is invalid; the message names the variable, its value and what is allowed."""


class EngineSettings(BaseSettings):
    """What the environment says. Endpoints are ZMQ's; the port ``*`` is any free one, told by ``/kv/v1/stats``."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="ignore")

    events_endpoint: str = "tcp://127.0.0.1:*"
    """PUB socket of the KV events."""
    replay_endpoint: str = "tcp://127.0.0.1:*"
    """ROUTER socket that replays event batches."""
    control_endpoint: str | None = None
    """``ipc://`` socket between api_server and engine process; absent: one in a private folder of this process."""
    control_timeout_s: Annotated[float, Field(gt=0, le=60)] = 2.0
    """How long ``/kv/v1`` waits for the engine process before it answers 503."""
    events_pending_blocks: Annotated[int, Field(ge=1)] = DEFAULT_PENDING_BLOCKS
    """Events that may wait to be published; one more, and the state is told anew."""
    events_replay_batches: Annotated[int, Field(ge=1)] = DEFAULT_REPLAY_BATCHES
    """Published batches kept for replay."""
    cpu_threads: Annotated[int | None, Field(ge=1)] = None
    """Torch threads of the CPU back end; absent: as many as this process may use."""
    cpu_kv_bytes: Annotated[int | None, Field(ge=1 << 20)] = None
    """Memory that the CPU back end offers for KV blocks; absent: by this machine's size."""
    digests_path: Path | None = None
    """A folder for the digests of weights, computed once for each state of a file; absent: ``digests`` in the cache
    folder."""
    ddr_bytes: Annotated[int, Field(ge=0)] = 0
    """Host memory for KV blocks below the engine's own pool; 0: no tiers."""
    ddr_path: Path | None = None
    """A file for that memory (in /dev/shm, say), found again after a restart; absent: memory of this process alone."""
    nvme_path: Path | None = None
    """A folder for the NVMe tier's file; absent: no NVMe tier."""
    nvme_bytes: Annotated[int, Field(ge=0)] = 0
    """Size of that file; 0 with a folder set: refused."""
    write_mode: WriteMode = WriteMode.THROUGH
    """When a block goes from DDR to NVMe: write_through, write_back or write_on_second_use."""
    tier_migrate: MigrationMode = MigrationMode.ALWAYS
    """Saves and writes to NVMe that cost more than they can save, by what was measured: made ``always``, or only where
    ``worthwhile``."""
    hbm_policy: str | None = None
    """Eviction policy of the engine's own pool, like ``lru`` or ``mq(lifetime=2)``; absent: ``adaptive``, or LMDeploy's
    own eviction for a model with recurrent state."""
    ddr_policy: str = DEFAULT_POLICY
    """Eviction policy of DDR; one for each tenant."""
    nvme_policy: str = DEFAULT_POLICY
    """Eviction policy of NVMe; one for each tenant."""
    shadow_policies: str = "lru,adaptive,s3fifo,arc,lru2"
    """Candidates that are followed beside the one in charge, at less than 1 % of a core; empty: none."""
    pin_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of each tier that pinned prefixes may have; 0: none can be pinned."""
    schedule: str = DEFAULT_STRATEGY
    """Which waiting request goes next, like ``hybrid`` or ``priority(ageing_bound_s=30)``."""
    pace: str | None = None
    """Whether a step computes prompts or tokens: ``lmdeploy`` (its own rule), ``alternate``, or ``itl_target`` with its
    parameters; absent: by ``itl_target_ms``."""
    itl_target_ms: Annotated[float | None, Field(ge=0, le=60_000)] = None
    """Milliseconds from one token of an answer to the next that prompts beside it may cause, unless ``pace`` says
    it; 0: no target, one decode step follows each prefill step. Absent: 55 on a GPU, 0 on a CPU."""
    max_requests: Annotated[int, Field(ge=1, le=1 << 20)] = 10_000
    """Requests that may wait and run in the instance; one more is answered 429."""
    warm_up_limit_s: Annotated[float, Field(ge=0, le=3600)] = 600.0
    """How long a start may send the engine prompts that compile what first requests would; 0: it sends none."""
    prompt_memory_bytes: Annotated[int, Field(ge=0)] = 64 << 20
    """Memory of the api_server for the tokens of what tenants sent, so that a new turn alone is tokenized; 0: none."""
    prefetch_probability: Annotated[float | None, Field(gt=0, le=1)] = None
    """Blocks that are used within 30 s with this probability or more go from NVMe to DDR ahead; absent: none."""
    ddr_high_watermark: Annotated[float | None, Field(gt=0, le=1)] = None
    """Share of DDR in use past which blocks go ahead of need; absent: all of it, with write_back 0.95."""
    ddr_low_watermark: Annotated[float | None, Field(gt=0, le=1)] = None
    """Share at which that ends; absent: the high one, with write_back 0.9."""
    nvme_high_watermark: Annotated[float | None, Field(gt=0, le=1)] = None
    """The same of NVMe; absent: all of it."""
    nvme_low_watermark: Annotated[float | None, Field(gt=0, le=1)] = None
    """Share at which that ends; absent: the high one."""
    load_deadline_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """A load from the tiers that takes longer is given up and its tokens are computed."""
    tenant_burst_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of each tier below HBM that one tenant may fill; requests without a salt are no tenant."""
    tenant_guaranteed_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of each tier below HBM that each of ``guaranteed_tenants`` is never pushed below."""
    pd_transport: PdTransport | None = None
    """How a prefill instance's blocks reach a decode instance: ``tcp`` (host memory), ``native`` (LMDeploy's own
    ``--migration-backend``), or, of a hybrid instance with tiers, ``tiers``; absent: tcp on a CPU, native on a GPU."""
    pd_host: str = "127.0.0.1"
    """Address that a prefill instance serves held prompts on."""
    pd_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Its port; 0: any free one, told by ``/kv/v1/stats``."""
    pd_advertised_host: str | None = None
    """Name or address under which decode instances reach it; absent: ``pd_host``."""
    pd_peers: str = LOOPBACK
    """Networks that may fetch held prompts here, or be asked for some, with commas between them."""
    pd_lease_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """How long a computed prompt waits to be fetched before its blocks are freed."""
    pd_transfer_timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """How long one transfer may take, its wait for a turn included, before the prompt is computed where it is decoded.
    """
    otlp_endpoint: str | None = None
    """An OpenTelemetry collector (OTLP over HTTP, like http://127.0.0.1:4318) that is sent spans of each request; or
    OTEL_EXPORTER_OTLP_ENDPOINT. Absent: none are made."""
    guaranteed_tenants: str = ""
    """Names of tenants as ``/kv/v1/quotas`` has them (16 hex digits, or ``shared``), with commas between them."""

    @field_validator("pd_peers")
    @classmethod
    def _are_networks(cls, text: str) -> str:
        parse_networks(text)
        return text

    @property
    def digests_folder(self) -> Path:
        """Return where digests of weights are kept."""
        return cache_dir() / "digests" if self.digests_path is None else self.digests_path

    @property
    def pd_networks(self) -> tuple[Network, ...]:
        """Return the networks of ``pd_peers``."""
        return parse_networks(self.pd_peers)

    @field_validator("hbm_policy", "ddr_policy", "nvme_policy")
    @classmethod
    def _is_policy(cls, text: str | None) -> str | None:
        if text is not None:
            parse_spec(text).make(capacity_blocks=1)  # what it raises is a ValueError that says what is allowed
        return text

    @field_validator("schedule")
    @classmethod
    def _is_strategy(cls, text: str) -> str:
        choice = parse_spec(text)
        make_strategy(choice.name, choice.parameters)
        return text

    @field_validator("pace")
    @classmethod
    def _is_pace(cls, text: str | None) -> str | None:
        if text is not None:
            choice = parse_spec(text)
            make_pace(choice.name, choice.parameters)
        return text

    @field_validator("itl_target_ms")
    @classmethod
    def _is_target(cls, target_ms: float | None) -> float | None:
        if target_ms:
            make_pace(ITL_TARGET, {"itl_target_ms": target_ms})  # what it raises says what is allowed
        return target_ms

    @field_validator("shadow_policies")
    @classmethod
    def _are_policies(cls, text: str) -> str:
        if text.strip():
            ShadowPolicies(parse_specs(text), capacity_blocks=1)
        return text

    @field_validator("events_endpoint", "replay_endpoint")
    @classmethod
    def _is_tcp_or_ipc(cls, value: str) -> str:
        if not value.startswith(("tcp://", "ipc://")):
            raise ValueError("must start with tcp:// or ipc://")
        return value

    @model_validator(mode="after")
    def _tiers_are_whole(self) -> Self:
        if (self.nvme_path is None) != (self.nvme_bytes == 0):
            raise ValueError("nvme_path and nvme_bytes go together: a folder, and how many bytes it may take")
        if self.ddr_bytes == 0 and self.pd_transport is PdTransport.TIERS:
            raise ValueError("pd_transport tiers needs ddr_bytes > 0: prompts go from one's host memory to the other's")
        if self.ddr_bytes == 0 and (self.ddr_path is not None or self.nvme_path is not None):
            raise ValueError("ddr_path and nvme_path need ddr_bytes > 0: host memory is on the way of every block")
        return self

    @model_validator(mode="after")
    def _watermarks_are_in_order(self) -> Self:
        for tier, (high, low) in (("ddr", self._ddr_marks()), ("nvme", self._nvme_marks())):
            if low > high:
                raise ValueError(f"{tier}_low_watermark is {low}; it must not be above the high one ({high})")
        if self.write_mode is WriteMode.BACK and self._ddr_marks()[0] >= 1:
            raise ValueError("write_back needs ddr_high_watermark below 1: from there on blocks are written back")
        return self

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        names, share = self.guaranteed_names, self.tenant_guaranteed_share
        strange = [name for name in names if name != SHARED_TENANT and not _TENANT.fullmatch(name)]
        if strange:
            raise ValueError(
                f"guaranteed_tenants has {strange[0]!r}; allowed are {SHARED_TENANT} and names of 16 hex digits"
            )
        if len(set(names)) != len(names):
            raise ValueError("guaranteed_tenants names a tenant twice")
        if share > self.tenant_burst_share:
            raise ValueError(
                f"tenant_guaranteed_share is {share}; "
                f"it must not be above tenant_burst_share ({self.tenant_burst_share})"
            )
        if bool(names) != (share > 0):
            raise ValueError("tenant_guaranteed_share and guaranteed_tenants go together: how much, and for whom")
        if share * len(names) > 1 + _ROUNDING:
            raise ValueError(f"{len(names)} guaranteed_tenants with a share of {share} each are more than a tier")
        return self

    @property
    def guaranteed_names(self) -> tuple[str, ...]:
        """Return the tenants that are given a guarantee."""
        return tuple(name.strip() for name in self.guaranteed_tenants.split(",") if name.strip())

    @property
    def ddr_watermarks(self) -> Watermarks:
        """Return what holds for DDR."""
        high, low = self._ddr_marks()
        return Watermarks(high=high, low=low)

    @property
    def nvme_watermarks(self) -> Watermarks:
        """Return what holds for NVMe."""
        high, low = self._nvme_marks()
        return Watermarks(high=high, low=low)

    def _ddr_marks(self) -> tuple[float, float]:
        if self.ddr_high_watermark is None and self.write_mode is WriteMode.BACK:
            return WRITE_BACK_HIGH, self.ddr_low_watermark or WRITE_BACK_LOW
        return _marks(self.ddr_high_watermark, self.ddr_low_watermark)

    def _nvme_marks(self) -> tuple[float, float]:
        return _marks(self.nvme_high_watermark, self.nvme_low_watermark)

    @field_validator("control_endpoint")
    @classmethod
    def _is_local(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.startswith("ipc:///"):
            raise ValueError("must be ipc:// and an absolute path: it is for this machine alone")
        if len(value.removeprefix("ipc://").encode()) > MAX_IPC_PATH_BYTES:
            raise ValueError(f"the path of a Unix socket may have at most {MAX_IPC_PATH_BYTES} bytes")
        return value

    @classmethod
    def load(cls) -> Self:
        """Read the environment; raises ``SettingsError`` with one line for each invalid or unknown variable."""
        known = {f"{ENV_PREFIX}{name.upper()}" for name in cls.model_fields}
        unknown = sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known)
        if unknown:
            raise SettingsError(
                "\n".join(f"{name}: unknown setting; known are {', '.join(sorted(known))}" for name in unknown)
            )
        try:
            return cls()
        except ValidationError as error:
            lines = [
                f"{ENV_PREFIX}{str(item['loc'][0]).upper()}={item.get('input')!r}: {item['msg']}"
                if item["loc"]
                else f"{ENV_PREFIX}*: {item['msg']}"
                for item in error.errors()
            ]
            raise SettingsError("\n".join(lines)) from error


def collector_of(settings: EngineSettings) -> Collector | None:
    """Return where spans go, None where none are made; raises ``SettingsError``."""
    try:
        return tracing.collector_of(settings.otlp_endpoint, setting=f"{ENV_PREFIX}OTLP_ENDPOINT")
    except TracingError as error:
        raise SettingsError(str(error)) from None


def _marks(high: float | None, low: float | None) -> tuple[float, float]:
    top = 1.0 if high is None else high
    return top, top if low is None else low
