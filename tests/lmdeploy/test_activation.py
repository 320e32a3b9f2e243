"""The CPU back end goes on only where it belongs, and says why when it does not."""

import pytest

from engines.lmdeploy import cpu
from tests.support.own_process import ran

pytestmark = pytest.mark.engine


def test_it_is_refused_where_cuda_is_available_and_touches_nothing() -> None:
    said = ran(
        "import torch; torch.cuda.is_available = lambda: True; stream = torch.cuda.Stream\n"
        "from engines.lmdeploy import cpu\n"
        "try: cpu.activate()\n"
        "except cpu.CpuActivationError as refusal: print(refusal, torch.cuda.Stream is stream)"
    )
    assert "CUDA is available" in said
    assert said.rstrip().endswith("True")


def test_a_second_activation_is_nothing_unless_it_wants_something_else() -> None:
    cpu.activate()
    cpu.activate(cpu.CpuResources(threads=1))
    with pytest.raises(cpu.CpuActivationError, match="needs another process"):
        cpu.activate(cpu.CpuResources(threads=1, kv_bytes=1))


def test_a_moved_symbol_stops_the_activation_by_name_and_leaves_torch_alone() -> None:
    said = ran(
        "import torch, warnings; warnings.simplefilter('ignore')\n"
        "import lmdeploy.pytorch.engine.model_agent.agent as agent\n"
        "stream, compile = torch.cuda.Stream, torch.compile\n"
        "del agent._try_to_cuda\n"
        "from engines.lmdeploy import cpu\n"
        "from engines.lmdeploy.patching import HookMismatchError\n"
        "try: cpu.activate()\n"
        "except HookMismatchError as error: print(error.problems)\n"
        "print(torch.cuda.Stream is stream, torch.compile is compile)"
    )
    assert "agent:_try_to_cuda does not exist" in said
    assert said.rstrip().endswith("True True")


def test_auto_is_float32_and_unknown_dtypes_are_refused_with_the_list() -> None:
    from lmdeploy.messages import PytorchEngineConfig

    assert PytorchEngineConfig(device_type="cpu").dtype == "float32"
    assert PytorchEngineConfig(device_type="cpu", dtype="bfloat16").dtype == "bfloat16"
    with pytest.raises(ValueError, match=r"'float8'.*auto, float32, float16, bfloat16"):
        PytorchEngineConfig(device_type="cpu", dtype="float8")
