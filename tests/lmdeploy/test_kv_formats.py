"""Quantised KV caches stay close to the float cache, and the rest of the engine works on them."""

from pathlib import Path

import pytest

from tests.support.engine import LocalEngine
from tests.support.models import random_prompt

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("quant_policy", [8, 4, 16, 17])
def test_a_quantised_cache_serves_hits_with_the_tokens_of_the_cold_run(tiny_llama: Path, quant_policy: int) -> None:
    prompts = [random_prompt(length, length) for length in (17, 70)]
    with LocalEngine.start(tiny_llama, quant_policy=quant_policy, enable_prefix_caching=True) as local:
        cold = local.generate(prompts)
        assert all(len(tokens) == 24 for tokens in cold)
        assert local.generate(prompts) == cold
        assert local.hit_tokens == 16 + 64
