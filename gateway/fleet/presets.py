"""Splits a preset into settings that a running instance can take over and those that need a restart.

A running instance accepts policies and quotas. Sizes, block sizes, batch sizes and the rest are fixed at its start; the
reported ones are compared with the preset, so that an operator sees each difference.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gateway.fleet.policies import Policy
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import InstanceStats, TierStats
from kvcontrol.presets import Preset

HOT: Final = ("ddr.policy", "nvme.policy", "quota.guaranteed_share", "quota.burst_share")
_KINDS: Final = {CacheTier.DDR: "eviction:ddr", CacheTier.NVME: "eviction:nvme"}

Value = str | int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A value of an instance's start, and the preset's value."""

    present: Value
    wanted: Value


def hot_values(preset: Preset) -> Mapping[str, Value]:
    """Return the preset's settings for running instances."""
    return {key: value for key, value in preset.values().items() if key in HOT}


def start_values(preset: Preset) -> Mapping[str, Value]:
    """Return the preset's settings that need a restart."""
    return {key: value for key, value in preset.values().items() if key not in HOT}


def wanted_policies(preset: Preset) -> tuple[Policy, ...]:
    """Return the policies that a preset wants, one for each of its tiers."""
    ddr = Policy(kind=_KINDS[CacheTier.DDR], name=preset.ddr.policy, params={})
    if preset.nvme is None:
        return (ddr,)
    return ddr, Policy(kind=_KINDS[CacheTier.NVME], name=preset.nvme.policy, params={})


def differences(stats: InstanceStats, preset: Preset) -> Mapping[str, Difference]:
    """Return the values of the preset that an instance reports to have been started without."""
    nvme_bytes = None if preset.nvme is None else preset.nvme.size_bytes
    compared: dict[str, tuple[Value, Value]] = {
        "context_tokens": (stats.context_length_tokens, preset.context_tokens),
        "max_batch_size": (stats.load.max_batch_size, preset.max_batch_size),
        "block_tokens": (stats.identity.block_size_tokens, preset.block_tokens),
        "ddr.size_bytes": _size(stats.tiers.get(CacheTier.DDR), preset.ddr.size_bytes),
        "nvme.size_bytes": _size(stats.tiers.get(CacheTier.NVME), nvme_bytes),
    }
    return {
        key: Difference(present=present, wanted=wanted)
        for key, (present, wanted) in compared.items()
        if present != wanted
    }


def _size(tier: TierStats | None, wanted: int | None) -> tuple[int | None, int | None]:
    """A tier has whole blocks: with as many as fit into the wanted size it has that size."""
    if tier is None or wanted is None or tier.block_bytes <= 0:
        return None if tier is None else tier.capacity_blocks * tier.block_bytes, wanted
    present = tier.capacity_blocks * tier.block_bytes
    return (wanted, wanted) if present <= wanted < present + 2 * tier.block_bytes else (present, wanted)
