"""Options of an engine that the machine or the engine's role rules out."""

from collections.abc import Sequence

from kvcontrol.core.quantisation import KVQuantisation
from kvcontrol.core.roles import EngineRole
from kvgate.engine.instance import EngineLimits
from kvgate.failure import CommandError
from kvgate.host.machine import Gpu, available_memory_bytes, gpu_compute_capability

_FP8_CAPABILITY = {KVQuantisation.FP8: 8.9, KVQuantisation.FP8_E5M2: 8.0}
"""From which compute capability on a GPU converts the type."""


def need_possible_role(role: EngineRole, *, on_gpu: bool, tiers: bool) -> None:
    """Raise ``CommandError`` for an instance in one of LMDeploy's roles that can't be what it is asked to be."""
    if role is EngineRole.HYBRID:
        return
    if on_gpu:
        raise CommandError(
            f"--role {role} migrates prompts on CPUs only: on GPUs LMDeploy needs DLSlime or Mooncake",
            "use tiers for the handover, or see docs/design/pd.md for LMDeploy's own transports",
        )
    if tiers:
        raise CommandError(
            f"--role {role} cannot be combined with tiers (--ddr, --preset)",
            "omit --role and set KVGATE_ENGINE_PD_TRANSPORT=tiers; the gateway's settings then define the prefill "
            "instances",
        )


def need_fitting_memory(limits: EngineLimits, *, on_gpu: bool, count: int = 1) -> None:
    """Raise ``CommandError`` for an amount of memory on a GPU and for a share on a CPU: neither has an effect there."""
    if on_gpu and limits.kv_bytes is not None:
        raise CommandError("--kv-memory on a GPU is a share of its free memory, for example 40%; or use --kv-blocks")
    if limits.kv_bytes is not None and limits.kv_bytes * count > (free_bytes := available_memory_bytes()):
        raise CommandError(
            f"--kv-memory asks for {limits.kv_bytes * count / 2**30:.1f} GiB ({count} engines), "
            f"and {free_bytes / 2**30:.1f} GiB of this machine's memory are free"
        )
    if not on_gpu and limits.kv_share is not None:
        raise CommandError("--kv-memory on a CPU is an amount, for example 2GiB; shares are for GPUs")


def need_possible_kv_quantisation(limits: EngineLimits, gpus: Sequence[Gpu]) -> None:
    """Raise ``CommandError`` for a type of KV that one of the GPUs can't compute with."""
    least = None if limits.kv_quantisation is None else _FP8_CAPABILITY.get(limits.kv_quantisation)
    if least is None:
        return
    for gpu in gpus:
        found = gpu_compute_capability(gpu)
        if found is not None and found < least:
            raise CommandError(
                f"KV in {limits.kv_quantisation} needs a GPU of compute capability {least} or higher; "
                f"{gpu.name} has {found}",
                "allowed here: "
                + ", ".join(each for each in KVQuantisation if _FP8_CAPABILITY.get(each, 0.0) <= found),
            )
