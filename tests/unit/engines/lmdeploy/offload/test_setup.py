"""Tiers are refused at the start where they could not be right, with the setting's name and what is possible."""

from collections.abc import Callable
from typing import Any

import pytest
from lmdeploy.messages import KVTransferConfig
from lmdeploy.pytorch.config import CacheConfig, DistConfig

from engines.lmdeploy.offload.setup import CONNECTOR, TierSetupError, prepare_config


def config(**changes: Any) -> CacheConfig:
    made = CacheConfig(max_batches=4, block_size=16, num_cpu_blocks=0, num_gpu_blocks=32)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[CacheConfig]]:
    """Prepare a configuration for an engine with tiers, and return those that LMDeploy's own function was given."""
    monkeypatch.setenv("KVGATE_ENGINE_DDR_BYTES", str(1 << 20))
    seen: list[CacheConfig] = []

    def original(cache_config: CacheConfig, **_: object) -> None:
        seen.append(cache_config)

    def run(cache_config: CacheConfig, dist_config: DistConfig | None = None) -> list[CacheConfig]:
        prepare_config(original)(cache_config, dist_config=dist_config)
        return seen

    return run


def test_an_engine_with_a_ddr_tier_gets_the_connector(prepare: Callable[..., list[CacheConfig]]) -> None:
    [seen] = prepare(config(), DistConfig())
    assert seen.kv_transfer_config.kv_connector == CONNECTOR


def test_without_a_ddr_tier_nothing_is_changed(
    prepare: Callable[..., list[CacheConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVGATE_ENGINE_DDR_BYTES")
    [seen] = prepare(config(window_size=128))
    assert seen.kv_transfer_config is None


@pytest.mark.parametrize(
    ("changes", "ranks", "why"),
    [
        ({"kv_transfer_config": KVTransferConfig(kv_connector="Other", kv_role="kv_both")}, None, "exclude each other"),
        ({}, DistConfig(tp=2), "needs an engine on one device"),
        ({}, DistConfig(dp=2, tp=2), "run one instance per device instead"),
        ({"states_shapes": [((1,), "float")]}, None, "keeps states besides KV blocks"),
        ({"window_size": 128}, None, "sliding-window attention"),
        ({"num_cpu_blocks": 4}, None, "set num_cpu_blocks to 0"),
    ],
)
def test_what_tiers_can_not_hold_correctly_stops_the_start(
    prepare: Callable[..., list[CacheConfig]], changes: dict[str, Any], ranks: DistConfig | None, why: str
) -> None:
    with pytest.raises(TierSetupError, match=why) as caught:
        prepare(config(**changes), ranks)
    assert "KVGATE_ENGINE_DDR_BYTES" in str(caught.value)
