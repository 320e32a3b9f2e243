"""``kvgate up``: prepare the model, start the engines and the gateway, and keep them until Ctrl-C."""

import asyncio
import os
import signal
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvcontrol.core.control import STATS_PATH
from kvgate.boards import StartBoard
from kvgate.display import plain
from kvgate.engine.block_size import need_possible_block_size
from kvgate.engine.extra import need_engine_extra
from kvgate.engine.fit import need_fitting_tiers
from kvgate.engine.instance import EngineLimits, Instance
from kvgate.engine.model import Model, embedded_model, model_from_folder, tiny_model
from kvgate.engine.preset_quotas import shares_of_preset
from kvgate.engine.presets import preset_line, preset_of_options, with_preset
from kvgate.engine.tier_flags import nvme_root_dir, tier_options
from kvgate.failure import INTERRUPTED, CommandError
from kvgate.host.machine import choose_gpus
from kvgate.host.paths import make_run_dir, make_socket_dir, remove_socket_dir
from kvgate.host.ports import need_free, reserved_ports
from kvgate.options import takes
from kvgate.supervision.child import ChildFailedError
from kvgate.supervision.probe import HttpProbe
from kvgate.supervision.serving import until_all_serve
from kvgate.supervision.supervisor import Supervisor
from kvgate.up.announce import announce
from kvgate.up.options import UpOptions
from kvgate.up.stack import (
    PORTS_PER_INSTANCE,
    GatewayOptions,
    chosen_transport,
    engine_specs,
    gateway_spec,
    need_keys_beyond_loopback,
    need_sane_count,
    plan_instances,
    with_fair_threads,
)
from kvgate.up.topology import Topology

if TYPE_CHECKING:
    from kvcontrol.presets import Preset

DEFAULT_INSTANCES = 2


@takes(UpOptions)
def up(options: UpOptions) -> None:
    """Start engines and the gateway on this machine, and stop them all at Ctrl-C.

    Prepares the model first: fetched and converted once, then kept in ~/.cache/kvgate.

    Without --preset and --ddr engines have no tiers: blocks that leave their KV memory are computed again.

    Ends with a curl to paste. A process that dies later is started again; one that dies before all are ready, or five
    times in a row, ends all with exit code 1.
    """
    started_s = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the event loop takes over
    need_engine_extra()
    gateway = options.gateway
    roles = Topology.parse(options.topology)
    count = roles.count(options.instances, DEFAULT_INSTANCES)
    need_sane_count(count)
    need_possible_block_size(options.block_size)
    need_free(gateway.host, gateway.port)
    need_keys_beyond_loopback(gateway)
    gpus = choose_gpus(options.device)
    preset = preset_of_options(options.preset, options.hardware, gpus)
    limits = options.limits if gpus else with_fair_threads(options.limits, count)
    served = _prepare(options.model, options.model_name, tiny=options.tiny)
    tiers = tier_options(options, preset, served.name, nvme_root_dir())
    transport = chosen_transport(roles, options.pd_transport, on_gpu=bool(gpus), tiers=bool(tiers.ddr_bytes))
    limits = replace(limits, tiers=tiers)
    if preset is not None:
        per_gpu = -(-count // len(gpus)) if gpus else 1
        limits = _with_preset(limits, preset, served, gateway, per_gpu)
    logs = make_run_dir(gateway.state_dir, pid=os.getpid(), now_s=time.time())
    sockets = make_socket_dir(os.getpid())
    try:
        with reserved_ports(PORTS_PER_INSTANCE * count, besides=[gateway.port]) as ports:
            planned = plan_instances(served, ports, gpus, limits, sockets, topology=roles, transport=transport)
            need_fitting_tiers([each.limits.tiers for each in planned])
            where = f"on {gpus[0].name}" if gpus else "on CPU"
            plain(f"Starting {len(planned)} x {served.name} {where} and the gateway; logs in {logs}")
            code = asyncio.run(_serve(planned, gateway, logs, started_s))
    finally:
        remove_socket_dir(sockets)
    raise typer.Exit(code)


def _with_preset(
    limits: EngineLimits, preset: "Preset", model: Model, gateway: GatewayOptions, engines_per_gpu: int
) -> EngineLimits:
    """Return the limits with the preset's settings and its quotas for the gateway's tenants; print what applies."""
    not_applied: list[str] = []
    if limits.tiers.ddr_bytes:
        from kvgate.up.tenants import tenants_of_keys

        shares, not_applied = shares_of_preset(preset, tenants_of_keys(gateway))
        limits = replace(limits, tiers=replace(limits.tiers, shares=shares))
    plain(preset_line(preset, not_applied))
    return with_preset(limits, preset, model, engines_per_gpu)


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
        announce(instances, gateway, took_s, warm_ups, stored_keys=stored_keys)
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
