"""``kvgate up``: prepare the model, start the engines and the gateway, and keep them until Ctrl-C."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvcontrol.core.control import STATS_PATH
from kvcontrol.core.roles import EngineRole, KVTransport
from kvgate.display import StartBoard, output, plain
from kvgate.engine.block_size import need_possible_block_size
from kvgate.engine.fit import need_fitting_tiers
from kvgate.engine.instance import EngineLimits, Instance
from kvgate.engine.itl_target import ItlTargetOption, need_possible_target
from kvgate.engine.model import Model, embedded_model, model_from_folder, tiny_model
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
from kvgate.failure import CommandError
from kvgate.host.machine import Device, choose_gpus
from kvgate.host.paths import make_run_dir, make_socket_dir, remove_socket_dir, state_dir
from kvgate.host.ports import LOOPBACK, need_free, reserved_ports
from kvgate.supervision.child import ChildFailedError
from kvgate.supervision.probe import HttpProbe
from kvgate.supervision.serving import until_all_serve
from kvgate.supervision.supervisor import Supervisor
from kvgate.up.api_keys import chosen_keys
from kvgate.up.stack import (
    PORTS_PER_INSTANCE,
    GatewayOptions,
    Routing,
    chosen_transport,
    engine_specs,
    gateway_spec,
    need_keys_beyond_loopback,
    need_sane_count,
    plan_instances,
    with_fair_threads,
)
from kvgate.up.tenants import shares_of_preset, tenants_of_keys
from kvgate.up.topology import Topology

DEFAULT_PORT = 8000
DEFAULT_INSTANCES = 2
INTERRUPTED = 130
_KEY_VARIABLE = "$KVGATE_API_KEY"
QUESTION = "What is the capital of France?"

_MODEL = "Model"
_ENGINE = "Engines"
_GATEWAY = "Gateway"


def up(  # noqa: PLR0913 - each is one option
    *,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face model folder. Default: SmolLM2-135M-Instruct, downloaded once.", rich_help_panel=_MODEL
        ),
    ] = None,
    tiny: Annotated[
        bool,
        typer.Option(
            "--tiny", help="Use a tiny random Llama: ready in seconds, answers are nonsense.", rich_help_panel=_MODEL
        ),
    ] = False,
    model_name: Annotated[
        str | None, typer.Option(help="Model name for clients. Default: the folder's name.", rich_help_panel=_MODEL)
    ] = None,
    instances: Annotated[
        int | None, typer.Option(help="Number of engines. Default: 2.", rich_help_panel=_ENGINE)
    ] = None,
    topology: Annotated[
        str,
        typer.Option(
            help="Roles: hybrid, pd (one prefill and one decode instance), or counts such as 1p1d, 1p2d, 2p1d.",
            rich_help_panel=_ENGINE,
        ),
    ] = "hybrid",
    pd_transport: Annotated[
        KVTransport | None,
        typer.Option(
            help="Transport from prefill to decode instances: migration, or tiers (--ddr). Default: tiers if "
            "configured.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    device: Annotated[
        Device, typer.Option(help="Device; auto: the visible GPUs, else the CPU.", rich_help_panel=_ENGINE)
    ] = Device.AUTO,
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a KV block: 16, 32, 64, ... Default: 16 on CPU, 64 on GPU.", rich_help_panel=_ENGINE
        ),
    ] = None,
    kv_blocks: Annotated[
        int | None, typer.Option(min=16, help="KV blocks of each engine.", rich_help_panel=_ENGINE)
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="KV memory of each engine: an amount on CPU (2GiB), a share of the free memory on GPU (40%).",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Largest batch of an engine: requests that run at once.", rich_help_panel=_ENGINE),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of each engine.", rich_help_panel=_ENGINE)
    ] = None,
    itl_target: ItlTargetOption = None,
    preset: PresetOption = None,
    hardware: HardwareOption = None,
    ddr: DdrOption = None,
    ddr_path: DdrPathOption = None,
    nvme: NvmeOption = None,
    nvme_dir: NvmeDirOption = None,
    tier_write: TierWriteOption = None,
    host: Annotated[
        str, typer.Option(envvar="KVGATE_HOST", help="Address that the gateway listens on.", rich_help_panel=_GATEWAY)
    ] = LOOPBACK,
    port: Annotated[
        int, typer.Option(envvar="KVGATE_PORT", help="Port of the gateway.", rich_help_panel=_GATEWAY)
    ] = DEFAULT_PORT,
    routing: Annotated[Routing, typer.Option(help="Routing policy.", rich_help_panel=_GATEWAY)] = Routing.COST_AWARE,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that clients must present: KEY or TENANT:KEY. Repeatable. None: any key, on loopback only. "
            "Other users see it in the process list; prefer --api-key-file or KVGATE_API_KEYS.",
            rich_help_panel=_GATEWAY,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with such keys, one per line, readable only by you.", rich_help_panel=_GATEWAY),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state-dir",
            envvar="KVGATE_STATE_DIR",
            help="Folder for durable state and logs. Default: ~/.local/state/kvgate.",
            rich_help_panel=_GATEWAY,
        ),
    ] = None,
) -> None:
    """Start engines and the gateway on this machine, and stop them all at Ctrl-C.

    Prepares the model first: fetched and converted once, then kept in ~/.cache/kvgate.

    Without --preset and --ddr engines have no tiers: blocks that leave their KV memory are computed again.

    Ends with a curl to paste. A process that dies later is started again; one that dies before all are ready, or five
    times in a row, ends all with exit code 1.
    """
    started_s = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the event loop takes over
    gateway = GatewayOptions(
        host=host,
        port=port,
        api_keys=chosen_keys(api_key or (), api_key_file),
        routing=routing,
        state_dir=state or state_dir(),
    )
    roles = Topology.parse(topology)
    count = roles.count(instances, DEFAULT_INSTANCES)
    need_sane_count(count)
    need_possible_block_size(block_size)
    need_possible_target(itl_target)
    need_free(host, port)
    need_keys_beyond_loopback(gateway)
    gpus = choose_gpus(device)
    chosen = preset_of_options(preset, hardware, gpus)
    flags = TierFlags(ddr=ddr, ddr_path=ddr_path, nvme=nvme, nvme_dir=nvme_dir, write_mode=tier_write)
    limits = with_kv_memory(
        EngineLimits(
            block_tokens=block_size,
            kv_blocks=kv_blocks,
            max_batch_size=max_batch_size,
            cpu_threads=threads,
            itl_target_ms=itl_target,
        ),
        kv_memory,
    )
    if not gpus:
        limits = with_fair_threads(limits, count)
    served = _prepare(model, model_name, tiny=tiny)
    tiers = tier_options(flags, chosen, served.name, nvme_root_dir())
    transport = chosen_transport(roles, pd_transport, on_gpu=bool(gpus), tiers=bool(tiers.ddr_bytes))
    not_applied: list[str] = []
    if chosen is not None and tiers.ddr_bytes:
        shares, not_applied = shares_of_preset(chosen, tenants_of_keys(gateway))
        tiers = replace(tiers, shares=shares)
    limits = replace(limits, tiers=tiers)
    if chosen is not None:
        per_gpu = -(-count // len(gpus)) if gpus else 1
        limits = with_preset(limits, chosen, served, per_gpu)
        plain(preset_line(chosen, not_applied))
    logs = make_run_dir(gateway.state_dir, pid=os.getpid(), now_s=time.time())
    sockets = make_socket_dir(os.getpid())
    try:
        with reserved_ports(PORTS_PER_INSTANCE * count, besides=[port]) as ports:
            planned = plan_instances(served, ports, gpus, limits, sockets, topology=roles, transport=transport)
            need_fitting_tiers([each.limits.tiers for each in planned])
            where = f"on {gpus[0].name}" if gpus else "on CPU"
            plain(f"Starting {len(planned)} x {served.name} {where} and the gateway; logs in {logs}")
            code = asyncio.run(_serve(planned, gateway, logs, started_s))
    finally:
        remove_socket_dir(sockets)
    raise typer.Exit(code)


def _prepare(folder: Path | None, name: str | None, *, tiny: bool) -> Model:
    if folder is not None and tiny:
        raise CommandError("--model and --tiny exclude each other", "omit one")
    if folder is not None:
        return model_from_folder(folder, name)
    return tiny_model(name) if tiny else embedded_model(name)


async def _serve(instances: list[Instance], gateway: GatewayOptions, logs: Path, started_s: float) -> int:
    """Run everything until a signal; return the exit code. Raises ``ChildFailedError``."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    board = StartBoard()
    stages = [engine_specs(instances), [gateway_spec(gateway, instances)]]
    async with HttpProbe() as probe, Supervisor(stages, logs, probe, board) as children:
        with board.shown():
            if not await _unless_stopped(until_all_serve(children, probe, gateway.url, len(instances)), stop):
                plain("Stopped before everything was ready.")
                return INTERRUPTED
            took_s = time.monotonic() - started_s
            stored_keys = not gateway.api_keys and not await probe(f"{gateway.url}/v1/models")  # 401 without one
            warm_ups = [(await probe.read(each.url + STATS_PATH)).get("warm_up_s") for each in instances]
        _announce(instances, gateway, took_s, warm_ups, stored_keys=stored_keys)
        await _unless_stopped(children.keep(_say_end), stop)
        plain("Stopping ...")
    plain("Stopped.")
    return 0


def _say_end(ended: ChildFailedError, pause_s: float) -> None:
    plain(f"{ended.child} {ended.what}; restart in {pause_s:.0f} s ({ended.advice})")


async def _unless_stopped(work: Coroutine[None, None, None], stop: asyncio.Event) -> bool:
    """Await ``work`` and return True, or cancel it and return False when ``stop`` is set first."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


def curl(gateway: GatewayOptions, model: Model, *, stored_keys: bool = False) -> str:
    """Return a command line that asks the gateway something; it works as it is, in any POSIX shell, where
    ``KVGATE_API_KEY`` has the key if the gateway wants one that was not typed. ``stored_keys``: its keys are those that
    an earlier run stored.
    """
    body = {
        "model": model.name,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 32,
    }
    key = ""
    if gateway.api_keys and gateway.api_keys[0].shown:
        key = f" -H 'authorization: Bearer {gateway.api_keys[0].key}'"
    elif gateway.api_keys or stored_keys:
        key = f' -H "authorization: Bearer {_KEY_VARIABLE}"'
    data = json.dumps(body).replace("'", "'\\''")
    return f"curl -s {gateway.url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{data}'"


def does(instance: Instance, warm_up_s: float | None) -> str:
    """Return what is shown beside a started instance; ``warm_up_s`` is how long it compiled before it was ready."""
    parts = [f"role: {instance.role}"] if instance.role is not EngineRole.HYBRID else []
    if not parts or instance.shares_tiers:
        parts.append(f"tiers: {instance.limits.tiers}")
    if warm_up_s is not None:
        parts.append(f"warm-up: {warm_up_s:.1f} s")
    return "   ".join(parts)


def _announce(
    instances: list[Instance],
    gateway: GatewayOptions,
    took_s: float,
    warm_ups: Sequence[float | None],
    *,
    stored_keys: bool,
) -> None:
    model = instances[0].model
    output.print(f"\n[bold green]kvgate is ready[/] on {gateway.url}  ({took_s:.0f} s)\n", soft_wrap=True)
    plain(f"  {curl(gateway, model, stored_keys=stored_keys)}\n")
    if stored_keys or (gateway.api_keys and not gateway.api_keys[0].shown):
        plain("with one of your keys in KVGATE_API_KEY.\n")
    plain(f"Dashboard  {gateway.url}/dashboard")
    for index, (instance, warm_up_s) in enumerate(zip(instances, warm_ups, strict=True)):
        plain(f"engine-{index}   {instance.url}   {does(instance, warm_up_s)}")
    if not instances[0].limits.tiers.ddr_bytes and instances[0].role is EngineRole.HYBRID:
        plain("Evicted KV blocks are lost; --ddr or --preset keeps them in tiers.")
    if stored_keys:
        plain(f"Clients present a key that {gateway.state_dir} stores; kvgate admin keys list shows them.")
    elif not gateway.api_keys:
        plain("No API key is set: the gateway listens on loopback only and accepts any key.")
    if not model.talks_sense:
        plain("The tiny model has random weights: its answers are nonsense.")
    plain("Ctrl-C stops everything.")


__all__ = ["curl", "up"]
