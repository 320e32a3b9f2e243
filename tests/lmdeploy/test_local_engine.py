"""What an engine inside a test's process may leave behind: nothing that a later test of the process feels."""

from pathlib import Path

import torch

from tests.support.engine import LocalEngine
from tests.support.models import random_prompt


def test_an_engine_leaves_the_modes_of_torch_as_they_were(tiny_llama: Path) -> None:
    with LocalEngine.start(tiny_llama) as local:
        local.generate([random_prompt(40, seed) for seed in range(3)])
        assert not torch.is_inference_mode_enabled()
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
