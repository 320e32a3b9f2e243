"""Which preset a command means, and what an engine is told of it beside its tiers."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcontrol.core.quantisation import KVQuantisation
from kvgate.engine.instance import EngineLimits
from kvgate.engine.model import Model
from kvgate.failure import CommandError
from kvgate.host.machine import Gpu

if TYPE_CHECKING:
    from kvcontrol.presets import Preset

CPU: Final = "cpu"
LAUNCHABLE: Final = frozenset({"cuda", "cpu"})
"""The devices that kvgate can start an engine on."""


def choose_preset(name: str, hardware: str | None, gpus: Sequence[Gpu]) -> "Preset":
    """Return the preset for the hardware that was named, or else for what this machine has.

    Raises ``CommandError`` for an unknown name, and for a GPU that no hardware part stands for.
    """
    from kvcontrol.presets import Presets, UnknownPresetError

    presets = Presets.shipped()
    if hardware is None:
        hardware = presets.recognise(gpus[0].name) if gpus else CPU
    if hardware is None:
        raise CommandError(
            f"no preset for {gpus[0].name}",
            f"choose the nearest hardware with --hardware: {', '.join(presets.hardware)}",
        )
    try:
        return presets.preset(name, hardware)
    except UnknownPresetError as error:
        raise CommandError(str(error), "kvgate doctor lists the presets") from error


def preset_of_options(name: str | None, hardware: str | None, gpus: Sequence[Gpu]) -> "Preset | None":
    """Return the preset that an engine is to be started with, if any.

    Raises ``CommandError`` as ``choose_preset``, and for hardware that engines can't be started on here.
    """
    if name is None:
        if hardware is not None:
            raise CommandError("--hardware needs --preset", "kvgate doctor lists presets and hardware")
        return None
    preset = choose_preset(name, hardware, gpus)
    if preset.engine.device != ("cuda" if gpus else "cpu"):
        raise CommandError(
            f"the preset is for {preset.hardware}, and engines would run on {gpus[0].name if gpus else 'the CPU'}",
            f"kvgate doctor --preset {name} --hardware {preset.hardware} explains the difference",
        )
    return preset


def with_preset(limits: EngineLimits, preset: "Preset", model: Model, engines_per_gpu: int) -> EngineLimits:
    """Return the limits with what nobody set taken from the preset.

    A context is never longer than the model's. Engines on one GPU share what the preset gives to one.
    """
    known = model_context_tokens(model.folder)
    context = preset.context_tokens if known is None else min(known, preset.context_tokens)
    share = limits.kv_share
    if share is None and limits.kv_blocks is None and preset.hbm_share is not None and not model.is_tiny:
        share = round(preset.hbm_share / max(1, engines_per_gpu), 3)
    return replace(
        limits,
        block_tokens=limits.block_tokens or preset.block_tokens,
        max_batch_size=limits.max_batch_size or preset.max_batch_size,
        context_tokens=limits.context_tokens or context,
        kv_share=share,
        max_prefill_tokens=preset.max_prefill_tokens,
        itl_target_ms=preset.itl_target_ms if limits.itl_target_ms is None else limits.itl_target_ms,
        kv_quantisation=limits.kv_quantisation or KVQuantisation(preset.engine.kv_quantisation),
        piecewise_cudagraph_tokens=preset.engine.piecewise_cudagraph_tokens,
    )


def preset_line(preset: "Preset", not_applied: Sequence[str]) -> str:
    """Return what a person who starts engines with a preset should know, in one line."""
    return "; ".join([f"Preset {preset.name} on {preset.hardware}", *preset.notes, *not_applied])


def model_context_tokens(folder: Path) -> int | None:
    """Return how many tokens a model's positions reach, None where its config doesn't say."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    places = [config, text] if isinstance(text, dict) else [config]
    lengths = [place.get("max_position_embeddings") for place in places]
    return next((tokens for tokens in lengths if isinstance(tokens, int) and tokens > 0), None)
