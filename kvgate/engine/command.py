"""``kvgate engine``: become one LMDeploy instance with kvgate's hooks."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvcontrol.core.roles import EngineRole
from kvgate.display import plain
from kvgate.engine.block_size import need_possible_block_size
from kvgate.engine.fit import need_fitting_tiers
from kvgate.engine.instance import EngineLimits, Instance
from kvgate.engine.itl_target import ItlTargetOption, need_possible_target
from kvgate.engine.model import model_from_folder
from kvgate.engine.presets import preset_line, preset_of_options, with_preset
from kvgate.engine.tier_flags import (
    DdrOption,
    DdrPathOption,
    HardwareOption,
    NvmeDirOption,
    NvmeOption,
    PresetOption,
    TierFlags,
    TierWriteOption,
    nvme_root_dir,
    tier_options,
)
from kvgate.engine.units import with_kv_memory
from kvgate.host.machine import Device, choose_gpus
from kvgate.host.paths import make_socket_dir, socket_endpoint
from kvgate.host.ports import LOOPBACK, free_ports, need_free
from kvgate.up.stack import need_fitting_memory, need_possible_role
from kvgate.up.tenants import shares_of_preset


def engine(  # noqa: PLR0913 - each is one option
    context: typer.Context,
    *,
    model: Annotated[Path, typer.Option(help="A Hugging Face model folder.")],
    model_name: Annotated[str | None, typer.Option(help="Model name for clients. Default: the folder's name.")] = None,
    host: Annotated[str, typer.Option(help="Address that the HTTP server listens on.")] = LOOPBACK,
    port: Annotated[int | None, typer.Option(help="HTTP port. Default: a free port, printed.")] = None,
    events_port: Annotated[
        int | None, typer.Option(help="Port of the KV events (ZMQ PUB). Default: a free port.")
    ] = None,
    replay_port: Annotated[
        int | None, typer.Option(help="Port that replays KV events (ZMQ ROUTER). Default: a free port.")
    ] = None,
    events_host: Annotated[
        str,
        typer.Option(
            help="Address of both event ports; * is every address, for a gateway on another host. They have no "
            "authentication."
        ),
    ] = LOOPBACK,
    device: Annotated[Device, typer.Option(help="Device; auto: the first visible GPU, else the CPU.")] = Device.AUTO,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a KV block: 16, 32, 64, ... Default: 16 on CPU, 64 on GPU.")
    ] = None,
    kv_blocks: Annotated[int | None, typer.Option(min=16, help="Number of KV blocks.")] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="KV memory: an amount on CPU (2GiB), a share of the free memory on GPU (40%).")
    ] = None,
    max_batch_size: Annotated[int | None, typer.Option(min=1, help="Largest batch: requests that run at once.")] = None,
    context_length: Annotated[
        int | None, typer.Option(min=1, help="Context length: most tokens of a prompt with its answer.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    itl_target: ItlTargetOption = None,
    role: Annotated[
        EngineRole,
        typer.Option(
            case_sensitive=False,
            help="Role: prefill (computes prompts for others), decode (answers them), or hybrid (both).",
        ),
    ] = EngineRole.HYBRID,
    preset: PresetOption = None,
    hardware: HardwareOption = None,
    ddr: DdrOption = None,
    ddr_path: DdrPathOption = None,
    nvme: NvmeOption = None,
    nvme_dir: NvmeDirOption = None,
    tier_write: TierWriteOption = None,
) -> None:
    """Run one engine instance: LMDeploy's api_server with KV events and /kv/v1.

    Options after -- go to LMDeploy as they are: kvgate engine --model DIR -- --log-level INFO
    """
    need_possible_target(itl_target)
    need_possible_block_size(block_size, extra=context.args)
    served = model_from_folder(model, model_name)
    gpus = choose_gpus(device)
    chosen = preset_of_options(preset, hardware, gpus)
    flags = TierFlags(ddr=ddr, ddr_path=ddr_path, nvme=nvme, nvme_dir=nvme_dir, write_mode=tier_write)
    tiers = tier_options(flags, chosen, served.name, nvme_root_dir())
    need_possible_role(role, on_gpu=bool(gpus), tiers=bool(tiers.ddr_bytes))
    not_applied: list[str] = []
    if chosen is not None and tiers.ddr_bytes:
        shares, not_applied = shares_of_preset(chosen, None)
        tiers = replace(tiers, shares=shares)
    limits = EngineLimits(
        block_tokens=block_size,
        kv_blocks=kv_blocks,
        max_batch_size=max_batch_size,
        context_tokens=context_length,
        cpu_threads=threads,
        itl_target_ms=itl_target,
        tiers=tiers,
    )
    free = free_ports(3)
    for name, wanted in (("--port", port), ("--events-port", events_port), ("--replay-port", replay_port)):
        if wanted is not None:
            need_free(
                host if name == "--port" else LOOPBACK if events_host == "*" else events_host, wanted, option=name
            )
    limits = with_kv_memory(limits, kv_memory)
    need_fitting_memory(limits, on_gpu=bool(gpus))
    if chosen is not None:
        limits = with_preset(limits, chosen, served, engines_per_gpu=1)
        plain(preset_line(chosen, not_applied))
    need_fitting_tiers([tiers])
    instance = Instance(
        model=served,
        host=host,
        port=free[0] if port is None else port,
        events_port=free[1] if events_port is None else events_port,
        replay_port=free[2] if replay_port is None else replay_port,
        events_host=events_host,
        control_endpoint=socket_endpoint(make_socket_dir(os.getpid()), "control"),
        gpu=gpus[0] if gpus else None,
        limits=limits,
        role=role,
        extra=tuple(context.args),
    )
    plain(f"{served.name} on {instance.url}, KV events on tcp://{events_host}:{instance.events_port}")
    plain(f"tiers below HBM: {tiers}")
    command = instance.command()
    os.execve(command[0], command, instance.environment())  # noqa: S606 - the same process goes on as the engine


__all__ = ["engine"]
