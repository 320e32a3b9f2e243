"""What ``kvgate up`` starts: engine instances and one gateway, as specifications of processes."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from gateway.loopback import is_loopback
from kvcontrol.core.roles import KVTransport
from kvgate.engine.checks import need_fitting_memory, need_possible_kv_quantisation
from kvgate.engine.instance import HEALTH_PATH, EngineLimits, Instance
from kvgate.engine.model import Model
from kvgate.failure import CommandError
from kvgate.host.machine import Gpu, available_memory_bytes, core_count
from kvgate.host.paths import socket_endpoint
from kvgate.host.ports import LOOPBACK
from kvgate.supervision.child import ChildSpec
from kvgate.up.api_keys import ApiKey
from kvgate.up.topology import ALL_HYBRID, Topology

PORTS_PER_INSTANCE = 3
MAX_INSTANCES = 64
GPU_SHARE = 0.8
TINY_KV_BYTES = 64 << 20
TINY_KV_BLOCKS = 2_048
"""KV blocks of a tiny model on a GPU."""
LEAST_KV_BYTES = 256 << 20
MOST_KV_BYTES = 4 << 30
START_LIMIT_S = 1800.0
CPU_PREFILL_TOKENS_PER_S = 200.0
"""What a cached token is worth to the gateway's routing: SmolLM2 in fp32 on two cores, measured; a GPU has another."""


class Routing(StrEnum):
    """How the gateway chooses among instances; the names are the gateway's."""

    COST_AWARE = "cost_aware"
    PREFIX_AFFINITY = "prefix_affinity"
    CONSISTENT_HASH = "consistent_hash"
    LEAST_LOAD = "least_load"
    ROUND_ROBIN = "round_robin"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """How the gateway listens and routes."""

    host: str
    port: int
    api_keys: tuple[ApiKey, ...]
    routing: Routing
    state_dir: Path

    @property
    def url(self) -> str:
        """Where this machine reaches it."""
        everywhere = {"0.0.0.0": LOOPBACK, "::": "::1"}  # noqa: S104
        host = everywhere.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def need_keys_beyond_loopback(options: GatewayOptions) -> None:
    """Raise ``CommandError`` when anyone on the network could use the gateway without a key."""
    if not is_loopback(options.host) and not options.api_keys:
        raise CommandError(
            f"--host {options.host} is reachable from other machines, and no API key is set",
            "set a key with --api-key-file or --api-key, or listen on 127.0.0.1",
        )


def need_sane_count(count: int) -> None:
    """Raise ``CommandError`` for a number of instances that can't be meant."""
    if not 0 < count <= MAX_INSTANCES:
        raise CommandError(f"--instances is {count}; allowed: 1 to {MAX_INSTANCES}")


def chosen_transport(
    topology: Topology, requested: KVTransport | None, *, on_gpu: bool, tiers: bool
) -> KVTransport | None:
    """Return how prompts are handed over, None where they aren't; raises ``CommandError`` where that can't be done."""
    if not topology.separated:
        if requested is not None:
            raise CommandError(
                "--pd-transport needs prefill and decode instances, and there are none",
                "add them with --topology, for example --topology pd",
            )
        return None
    transport = requested or (KVTransport.TIERS if tiers else KVTransport.MIGRATION)
    if transport is KVTransport.TIERS:
        if not tiers:
            raise CommandError(
                "--pd-transport tiers needs tiers, and there are none",
                "add a tier with --ddr, for example --ddr 2GiB, or with --preset",
            )
        return transport
    if on_gpu:
        raise CommandError(
            "--topology with prefill and decode instances migrates on CPUs alone: on GPUs LMDeploy needs DLSlime or "
            "Mooncake",
            "use tiers for the handover: --ddr 16GiB; docs/design/pd.md describes LMDeploy's own transports",
        )
    if tiers:
        raise CommandError(
            "--pd-transport migration cannot be combined with tiers (--ddr, --preset)",
            "omit one: LMDeploy has neither a prefix cache nor a KV connector in those roles",
        )
    return transport


def with_fair_threads(limits: EngineLimits, count: int, base: Mapping[str, str] = os.environ) -> EngineLimits:
    """Share the cores out among ``count`` engines on a CPU, unless options or environment say how many threads.

    Threads beyond the cores that an engine has for itself cost more than they bring: docs/design/lmdeploy-cpu.md.
    """
    if limits.cpu_threads is not None or "KVGATE_ENGINE_CPU_THREADS" in base:
        return limits
    return replace(limits, cpu_threads=max(1, core_count() // count))


def plan_instances(  # noqa: PLR0913 - what a machine has, and what is asked of it
    model: Model,
    ports: Sequence[int],
    gpus: Sequence[Gpu],
    limits: EngineLimits,
    sockets: Path,
    *,
    topology: Topology = ALL_HYBRID,
    transport: KVTransport | None = None,
) -> list[Instance]:
    """Make an instance of every ``PORTS_PER_INSTANCE`` ports, deal the GPUs round robin, share out the memory.

    Each has files of its own for its tiers.

    Raises ``CommandError`` when ``limits`` don't fit the device.
    """
    count = len(ports) // PORTS_PER_INSTANCE
    need_possible_kv_quantisation(limits, gpus)
    limits = _with_memory(limits, model, count, len(gpus))
    return [
        Instance(
            model=model,
            port=ports[PORTS_PER_INSTANCE * index],
            events_port=ports[PORTS_PER_INSTANCE * index + 1],
            replay_port=ports[PORTS_PER_INSTANCE * index + 2],
            control_endpoint=socket_endpoint(sockets, f"control-{index}"),
            gpu=gpus[index % len(gpus)] if gpus else None,
            role=topology.role(index),
            shares_tiers=transport is KVTransport.TIERS,
            limits=replace(limits, tiers=limits.tiers.of_instance(index)),
        )
        for index in range(count)
    ]


def _with_memory(limits: EngineLimits, model: Model, count: int, gpu_count: int) -> EngineLimits:
    """Share out memory where the user didn't: so much that instances beside each other don't starve one another."""
    need_fitting_memory(limits, on_gpu=gpu_count > 0, count=count)
    if limits.kv_blocks is not None:
        return limits
    if gpu_count:
        if model.is_tiny and limits.kv_share is None:  # a share of a GPU would be millions of its blocks
            return replace(limits, kv_blocks=TINY_KV_BLOCKS)
        per_gpu = -(-count // gpu_count)
        return limits if limits.kv_share is not None else replace(limits, kv_share=round(GPU_SHARE / per_gpu, 3))
    if limits.kv_bytes is not None:
        return limits
    fair_bytes = available_memory_bytes() // 4 // count
    kv_bytes = TINY_KV_BYTES if model.is_tiny else min(MOST_KV_BYTES, max(LEAST_KV_BYTES, fair_bytes))
    return replace(limits, kv_bytes=kv_bytes)


def engine_specs(instances: Sequence[Instance], base: Mapping[str, str] = os.environ) -> list[ChildSpec]:
    """Return the processes of the instances, named ``engine-0``, ``engine-1``..."""
    return [
        ChildSpec(
            name=f"engine-{index}",
            command=instance.command(),
            environment=instance.environment(base),
            ready_url=instance.url + HEALTH_PATH,
            start_limit_s=START_LIMIT_S,
            alive_url=instance.url + HEALTH_PATH,
        )
        for index, instance in enumerate(instances)
    ]


def gateway_spec(
    options: GatewayOptions, instances: Sequence[Instance], base: Mapping[str, str] = os.environ
) -> ChildSpec:
    """Return the gateway's process; it is ready when it has a usable instance."""
    settings = [
        {"id": f"engine-{index}", "url": instance.url}
        | ({"role": instance.role.value} if instance.shares_tiers else {})  # else it says so itself
        for index, instance in enumerate(instances)
    ]
    on_cpu = instances[0].gpu is None and not instances[0].model.is_tiny
    if on_cpu and "KVGATE_PREFILL_TOKENS_PER_S" not in base:
        base = {**base, "KVGATE_PREFILL_TOKENS_PER_S": str(CPU_PREFILL_TOKENS_PER_S)}
    return gateway_child(options, settings, tokenizer=instances[0].model.folder, base=base)


def gateway_child(
    options: GatewayOptions, instances: Sequence[Mapping[str, str]], *, tokenizer: Path, base: Mapping[str, str]
) -> ChildSpec:
    """Return the process of a gateway for any instances, which are told as its settings have them."""
    settings = {
        "KVGATE_HOST": options.host,
        "KVGATE_PORT": str(options.port),
        "KVGATE_INSTANCES": json.dumps(list(instances)),
        "KVGATE_TOKENIZER": str(tokenizer),
        "KVGATE_STATE_DIR": str(options.state_dir),
        "KVGATE_ROUTING_POLICY": options.routing.value,
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if options.api_keys:
        settings["KVGATE_API_KEYS"] = json.dumps([{"key": key.key, "tenant": key.tenant} for key in options.api_keys])
    return ChildSpec(
        name="gateway",
        command=(sys.executable, "-m", "gateway"),
        environment={"KVGATE_SHUTDOWN_NOTICE_S": "0"} | dict(base) | settings,  # nobody can go elsewhere
        ready_url=f"{options.url}/readyz",
        start_limit_s=START_LIMIT_S,
        alive_url=f"{options.url}/healthz",
    )
