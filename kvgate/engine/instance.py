"""One engine instance as a command line and an environment: LMDeploy's api_server with kvgate's hooks.

``kvgate engine`` becomes this process, ``kvgate up`` starts several.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from engines.models.cache import cache_dir
from kvcontrol.core.quantisation import KVQuantisation
from kvcontrol.core.roles import EngineRole
from kvgate.engine.model import Model
from kvgate.engine.tiers import TierOptions
from kvgate.host.machine import Gpu
from kvgate.host.ports import LOOPBACK

CPU_BLOCK_TOKENS = 16
CUDA_BLOCK_TOKENS = 64
CUDA_GRAPH_PROMPT_TOKENS = 2048
"""Prompts of up to so many new tokens run from piecewise CUDA graphs unless a preset or the user says otherwise.

Measured on an H200 (7B): a cached prompt's first token after 0.025 s instead of 0.050; four graphs take 1 GB.
"""
HEALTH_PATH = "/health"
_COMPILED = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Where compiled kernels are kept between starts: below kvgate's cache folder, unless the environment names a place."""
CPU_KV_SHARE = 0.8
"""LMDeploy never takes all of what it is told is free; what the user asked for is this share of what it is told."""

GATEWAY_SECRETS = frozenset(
    f"KVGATE_{name}"
    for name in ("API_KEYS", "ADMIN_KEY", "METRICS_KEY", "REGISTRATION_KEY", "SALT_SECRET", "STORE_URL", "REDIS_URL")
)
"""Variables that no engine process gets: it runs models, and maybe their code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """How much an instance takes on; None leaves it to the engine.

    ``kv_bytes`` is for the CPU, ``kv_share`` (of the GPU's free memory) for CUDA; ``kv_blocks`` overrides both.
    """

    block_tokens: int | None = None
    kv_blocks: int | None = None
    kv_bytes: int | None = None
    kv_share: float | None = None
    max_batch_size: int | None = None
    context_tokens: int | None = None
    cpu_threads: int | None = None
    max_prefill_tokens: int | None = None
    itl_target_ms: float | None = None
    kv_quantisation: KVQuantisation | None = None
    piecewise_cudagraph_tokens: int | None = None
    tiers: TierOptions = field(default_factory=TierOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """What distinguishes one instance: its model, its ports, its device. ``gpu`` None means the CPU."""

    model: Model
    host: str = LOOPBACK
    port: int
    events_port: int
    replay_port: int
    events_host: str = LOOPBACK
    """Where both listen; ``*`` is every address, for a gateway on another host."""
    control_endpoint: str
    gpu: Gpu | None
    role: EngineRole = EngineRole.HYBRID
    shares_tiers: bool = False
    """Prompts go from one to another through the tiers: then the engine is a hybrid one, and the role the gateway's."""
    limits: EngineLimits = field(default_factory=EngineLimits)
    extra: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Where it serves HTTP; an address that listens everywhere is reached through loopback."""
        host = LOOPBACK if self.host in {"0.0.0.0", "::"} else self.host  # noqa: S104
        return f"http://{host}:{self.port}"

    def command(self) -> tuple[str, ...]:
        """Return the process's arguments; ``extra`` comes last, so that the user's own LMDeploy options win."""
        limits = self.limits
        default_block = CPU_BLOCK_TOKENS if self.gpu is None else CUDA_BLOCK_TOKENS
        options: dict[str, object] = {
            "--server-name": self.host,
            "--server-port": self.port,
            "--model-name": self.model.name,
            "--backend": "pytorch",
            "--cache-block-seq-len": limits.block_tokens or default_block,
        }
        optional: dict[str, object | None] = {
            "--num-gpu-blocks": limits.kv_blocks,
            "--cache-max-entry-count": limits.kv_share,
            "--max-batch-size": limits.max_batch_size,
            "--session-len": limits.context_tokens,
            "--max-prefill-token-num": limits.max_prefill_tokens,
            "--quant-policy": limits.kv_quantisation,
            "--piecewise-cudagraph-max-tokens": limits.piecewise_cudagraph_tokens,
        }
        if self.gpu is not None and limits.piecewise_cudagraph_tokens is None:
            optional["--piecewise-cudagraph-max-tokens"] = CUDA_GRAPH_PROMPT_TOKENS
        if self.gpu is None and limits.kv_bytes is not None:
            optional["--cache-max-entry-count"] = CPU_KV_SHARE
        options |= {name: value for name, value in optional.items() if value is not None}
        launch = (sys.executable, "-m", "engines.lmdeploy.launch", "serve", "api_server", str(self.model.folder))
        pairs = (str(word) for pair in options.items() for word in pair)
        mode: tuple[str, ...] = ("--enable-prefix-caching",)
        if self.role is not EngineRole.HYBRID and not self.shares_tiers:  # LMDeploy has no prefix cache in the others
            mode = ("--role", self.role.value.capitalize())
        return (*launch, *pairs, *mode, *self.extra)

    def environment(self, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the process's environment: ``base`` without the gateway's secrets, and the instance's own settings."""
        settings = {
            "KVGATE_ENGINE_EVENTS_ENDPOINT": f"tcp://{self.events_host}:{self.events_port}",
            "KVGATE_ENGINE_REPLAY_ENDPOINT": f"tcp://{self.events_host}:{self.replay_port}",
            "KVGATE_ENGINE_CONTROL_ENDPOINT": self.control_endpoint,
            "CUDA_VISIBLE_DEVICES": "" if self.gpu is None else self.gpu.selector,
            "HF_HUB_OFFLINE": "1",  # the model is a folder: nothing is ever asked of a hub
            **{name: str(cache_dir() / "kernels" / kind) for name, kind in _COMPILED.items() if name not in base},
            "PYTHONUNBUFFERED": "1",
        }
        if self.limits.cpu_threads is not None:
            settings["KVGATE_ENGINE_CPU_THREADS"] = str(self.limits.cpu_threads)
        if self.limits.kv_bytes is not None:
            settings["KVGATE_ENGINE_CPU_KV_BYTES"] = str(int(self.limits.kv_bytes / CPU_KV_SHARE))
        if self.limits.itl_target_ms is not None:
            settings["KVGATE_ENGINE_ITL_TARGET_MS"] = f"{self.limits.itl_target_ms:g}"
        if self.shares_tiers:
            settings["KVGATE_ENGINE_PD_TRANSPORT"] = "tiers"
        settings |= self.limits.tiers.environment()
        return {name: value for name, value in base.items() if name not in GATEWAY_SECRETS} | settings
