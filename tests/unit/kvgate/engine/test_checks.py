"""What a machine's GPUs rule out is refused before an engine starts."""

import pytest

from kvcontrol.core.quantisation import KVQuantisation
from kvgate.engine.checks import need_possible_kv_quantisation
from kvgate.engine.instance import EngineLimits
from kvgate.failure import CommandError
from kvgate.host import machine
from kvgate.host.machine import Gpu

CAPABILITIES = {"0": "9.0", "1": "8.0", "2": "7.5", "3": "[N/A]"}


@pytest.fixture(autouse=True)
def _nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_nvidia_smi", lambda *options: CAPABILITIES[options[0].removeprefix("--id=")])


def gpu(selector: str) -> Gpu:
    return Gpu(selector=selector, name=f"GPU {selector}")


@pytest.mark.parametrize("quantisation", KVQuantisation)
def test_a_hopper_takes_every_type_and_so_does_a_gpu_of_which_nothing_is_known(quantisation: KVQuantisation) -> None:
    need_possible_kv_quantisation(EngineLimits(kv_quantisation=quantisation), [gpu("0"), gpu("3")])


@pytest.mark.parametrize(
    ("selector", "quantisation", "allowed"),
    [
        ("1", KVQuantisation.FP8, "none, int4, int8, fp8_e5m2"),
        ("2", KVQuantisation.FP8, "none, int4, int8"),
        ("2", KVQuantisation.FP8_E5M2, "none, int4, int8"),
    ],
)
def test_a_gpu_that_cant_convert_the_type_is_named_with_what_it_can(
    selector: str, quantisation: KVQuantisation, allowed: str
) -> None:
    with pytest.raises(CommandError, match=f"KV in {quantisation} needs .* GPU {selector} has") as caught:
        need_possible_kv_quantisation(EngineLimits(kv_quantisation=quantisation), [gpu("0"), gpu(selector)])
    assert caught.value.advice == f"allowed here: {allowed}"


def test_without_gpus_nothing_is_asked() -> None:
    need_possible_kv_quantisation(EngineLimits(kv_quantisation=KVQuantisation.FP8), [])
