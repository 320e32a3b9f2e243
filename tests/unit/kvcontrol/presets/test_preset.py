"""The merge of a workload and hardware."""

import pytest

from kvcontrol.presets import Evidence, Presets, UnknownPresetError

SHIPPED = Presets.shipped()


def test_each_part_brings_its_own_keys() -> None:
    preset = SHIPPED.preset("low-latency", "nvidia-h100")
    assert (preset.context_tokens, preset.max_prefill_tokens) == (32_768, 2_048)
    assert (preset.block_tokens, preset.hbm_share, preset.engine.piecewise_cudagraph_tokens) == (64, 0.8, 2048)
    assert preset.notes == ()
    assert {"quota.burst_share", "host_cores"} <= set(preset.not_measured)
    assert "max_batch_size" not in preset.not_measured


def test_hardware_lowers_what_a_workload_asks_for_and_says_so() -> None:
    preset = SHIPPED.preset("throughput", "cpu")
    assert preset.nvme is not None
    assert (preset.context_tokens, preset.max_batch_size) == (8_192, 8)
    assert (preset.ddr.size_bytes, preset.nvme.size_bytes) == (2 << 30, 8 << 30)
    assert "ddr.size is 2GiB, the most for cpu; throughput asks for 64GiB" in preset.notes
    assert len(preset.notes) == 4


def test_hardware_never_raises_what_a_workload_asks_for() -> None:
    assert SHIPPED.preset("long-context-128k", "cpu").max_batch_size == 2


def test_the_hardwares_deadline_takes_the_workloads_place() -> None:
    assert SHIPPED.preset("low-latency", "cpu").load_deadline_s == 30
    assert SHIPPED.preset("low-latency", "nvidia-h100").load_deadline_s == 0.4


def test_an_itl_target_is_for_gpus() -> None:
    assert SHIPPED.preset("low-latency", "nvidia-h100").itl_target_ms == 40
    assert SHIPPED.preset("throughput", "nvidia-h100").itl_target_ms == 0
    assert SHIPPED.preset("low-latency", "cpu").itl_target_ms is None


def test_on_hardware_that_nobody_tried_no_value_counts_as_measured() -> None:
    untried = SHIPPED.preset("long-context-32k", "ascend-910b")
    assert untried.evidence is Evidence.NONE
    assert {"max_prefill_tokens", "block_tokens", "ddr.policy"} <= set(untried.not_measured)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownPresetError, match=r"unknown preset 'fast'; known: long-context-32k, .*low-laten"):
        SHIPPED.preset("fast", "cpu")
    with pytest.raises(UnknownPresetError, match="unknown hardware 'tpu'; known: nvidia-h100, "):
        SHIPPED.preset("throughput", "tpu")


def test_values_stand_under_the_files_keys_in_the_files_form() -> None:
    values = SHIPPED.preset("long-context-64k", "nvidia-h100").values()
    assert (values["ddr.size"], values["nvme.size"], values["engine.piecewise_cudagraph_tokens"]) == (
        *("64GiB", "256GiB"),
        2048,
    )
    assert SHIPPED.preset("low-latency", "nvidia-h100").values()["nvme"] is None
