"""``kvgate engine``: become one LMDeploy instance with kvgate's hooks."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from kvgate.display import plain
from kvgate.engine.block_size import need_possible_block_size
from kvgate.engine.checks import need_fitting_memory, need_possible_kv_quantisation, need_possible_role
from kvgate.engine.extra import need_engine_extra
from kvgate.engine.fit import need_fitting_tiers
from kvgate.engine.instance import EngineLimits, Instance
from kvgate.engine.model import Model, model_from_folder
from kvgate.engine.options import EngineOptions
from kvgate.engine.preset_quotas import shares_of_preset
from kvgate.engine.presets import preset_line, preset_of_options, with_preset
from kvgate.engine.tier_flags import nvme_root_dir, tier_options
from kvgate.engine.tiers import TierOptions
from kvgate.host.machine import choose_gpus
from kvgate.host.paths import make_socket_dir, socket_endpoint
from kvgate.options import takes

if TYPE_CHECKING:
    from kvcontrol.presets import Preset


@takes(EngineOptions)
def engine(options: EngineOptions) -> None:
    """Run one engine instance: LMDeploy's api_server with KV events and /kv/v1.

    LMDeploy receives the options after --: kvgate engine --model DIR -- --log-level INFO
    """
    need_engine_extra()
    extra = tuple(options.context.args)
    need_possible_block_size(options.block_size, extra=extra)
    served = model_from_folder(options.model, options.model_name)
    gpus = choose_gpus(options.device)
    preset = preset_of_options(options.preset, options.hardware, gpus)
    tiers = tier_options(options, preset, served.name, nvme_root_dir())
    need_possible_role(options.role, on_gpu=bool(gpus), tiers=bool(tiers.ddr_bytes))
    port, events_port, replay_port = options.ports()
    limits = replace(options.limits, context_tokens=options.context_length)
    need_fitting_memory(limits, on_gpu=bool(gpus))
    limits = _with_tiers(limits, tiers, preset, served)
    need_possible_kv_quantisation(limits, gpus)
    instance = Instance(
        model=served,
        host=options.host,
        port=port,
        events_port=events_port,
        replay_port=replay_port,
        events_host=options.events_host,
        control_endpoint=socket_endpoint(make_socket_dir(os.getpid()), "control"),
        gpu=gpus[0] if gpus else None,
        limits=limits,
        role=options.role,
        extra=extra,
    )
    plain(f"{served.name} on {instance.url}, KV events on tcp://{instance.events_host}:{instance.events_port}")
    plain(f"tiers below HBM: {limits.tiers}")
    command = instance.command()
    os.execve(command[0], command, instance.environment())  # noqa: S606 - the same process goes on as the engine


def _with_tiers(limits: EngineLimits, tiers: TierOptions, preset: "Preset | None", model: Model) -> EngineLimits:
    """Return the limits with tiers and with the preset's settings, which are printed. Raises ``CommandError``."""
    not_applied: list[str] = []
    if preset is not None and tiers.ddr_bytes:
        shares, not_applied = shares_of_preset(preset, None)
        tiers = replace(tiers, shares=shares)
    limits = replace(limits, tiers=tiers)
    if preset is not None:
        limits = with_preset(limits, preset, model, engines_per_gpu=1)
        plain(preset_line(preset, not_applied))
    need_fitting_tiers([tiers])
    return limits
