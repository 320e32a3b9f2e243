import pytest

from kvgate.failure import CommandError
from kvgate.machine import Gpu
from kvgate.presets import choose_preset

H100 = Gpu(selector="0", name="NVIDIA H100 80GB HBM3")
A100 = Gpu(selector="0", name="NVIDIA A100-SXM4-80GB")


def test_the_hardware_is_what_this_machine_has() -> None:
    assert choose_preset("throughput", None, [H100]).hardware == "nvidia-h100"
    assert choose_preset("throughput", None, []).hardware == "cpu"


def test_hardware_that_is_named_wins() -> None:
    assert choose_preset("throughput", "ascend-910b", [H100]).hardware == "ascend-910b"


def test_a_card_that_no_preset_is_made_for_is_not_guessed_at() -> None:
    with pytest.raises(CommandError, match="no preset is made for NVIDIA A100-SXM4-80GB") as caught:
        choose_preset("throughput", None, [A100])
    assert "--hardware; there is nvidia-h100, ascend-910b" in caught.value.advice


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(CommandError, match="no preset is called 'fast'; there are long-context-32k"):
        choose_preset("fast", None, [])
    with pytest.raises(CommandError, match="no hardware is called 'tpu'; there is nvidia-h100"):
        choose_preset("throughput", "tpu", [])
