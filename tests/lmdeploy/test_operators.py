"""Each operator laid out for a CPU computes what LMDeploy's or torch's own does."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def _fixed_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 8, 9])
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_layer_is_torchs(threads: int, rows: int, biased: bool) -> None:  # noqa: FBT001
    from engines.lmdeploy.cpu.linear import CpuLinear

    weight = torch.nn.Parameter(torch.randn(36, 24), requires_grad=False)
    bias = torch.randn(36) if biased else None
    x = torch.randn(1, rows, 24)
    expected = torch.nn.functional.linear(x, weight, bias)
    layer = CpuLinear(threads=threads, in_features=24, out_features=36)
    torch.testing.assert_close(layer.forward(x, *layer.update_weights(weight, bias)), expected)


def test_an_embedding_tied_to_a_linear_layer_shares_its_weight_after_the_transposition() -> None:
    from engines.lmdeploy.cpu.linear import CpuLinear

    weight = torch.nn.Parameter(torch.randn(48, 16), requires_grad=False)
    before = weight.clone()
    loaded, _ = CpuLinear(threads=2, in_features=16, out_features=48).update_weights(weight)
    assert loaded is weight
    assert weight.stride() == (1, 48)
    assert torch.equal(torch.nn.functional.embedding(torch.tensor([3, 47]), weight), before[[3, 47]])


@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_is_lmdeploys(with_residual: bool) -> None:  # noqa: FBT001
    from lmdeploy.pytorch.backends.default.norm import DefaultRMSNormImpl

    from engines.lmdeploy.cpu.norm import CpuRMSNorm

    x, weight = torch.randn(1, 3, 64), torch.randn(64)
    residual = torch.randn(1, 3, 64) if with_residual else None
    ours = CpuRMSNorm(64, 1e-5).forward(x, weight, residual)
    torch.testing.assert_close(ours, DefaultRMSNormImpl(64, 1e-5).forward(x, weight, residual))


@pytest.mark.parametrize("inplace", [False, True])
def test_rotation_is_lmdeploys_over_several_steps(inplace: bool) -> None:  # noqa: FBT001
    from lmdeploy.pytorch.backends.default.apply_rotary_emb import DefaultApplyRotaryEmbImpl

    from engines.lmdeploy.cpu.rotary import CpuApplyRotary

    ours, theirs = CpuApplyRotary(), DefaultApplyRotaryEmbImpl()
    for _ in range(2):
        query, key = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
        angles = torch.randn(5, 8).repeat(1, 2)
        tables: tuple[Any, Any] = angles.cos(), angles.sin()
        expected = theirs.forward(query.clone(), key.clone(), *tables, inplace=False)
        rotated = ours.forward(query, key, *tables, inplace=inplace)
        torch.testing.assert_close(rotated, expected)
        assert (rotated[0] is query) == inplace


def test_a_uniform_number_is_fixed_by_seed_and_position_and_evenly_spread() -> None:
    from engines.lmdeploy.cpu.sampling import uniform

    draws = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert uniform(5, 7) == uniform(5, 7)
    assert len(set(draws)) == len(draws)
    assert all(0 <= draw < 1 for draw in draws)
    assert abs(sum(draws) / len(draws) - 0.5) < 0.01
    assert (torch.histc(torch.tensor(draws), 10, 0, 1) - 1000).abs().max() < 150


def test_sampling_follows_the_probabilities_and_never_takes_an_impossible_token() -> None:
    from engines.lmdeploy.cpu.sampling import SeededMultinomialSampling

    scores = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0]).expand(4000, -1)
    tokens = torch.arange(10, 16).expand(4000, -1)
    chosen = SeededMultinomialSampling().forward(
        scores, torch.arange(4000), torch.zeros(4000, dtype=torch.long), tokens
    )
    counts = torch.bincount(chosen, minlength=16)[10:]
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    assert (counts / 4000 - scores[0]).abs().max() < 0.03


def test_sequences_of_very_different_lengths_are_not_padded_to_the_longest() -> None:
    from engines.lmdeploy.cpu.step import plan_step

    tokens = [5, 17, 1600, 1500]
    step = plan_step(
        page_tokens=16, page_table=torch.zeros(4, 100), new_tokens=[1] * 4, tokens=tokens, dtype=torch.float32
    )
    padded = sum(group.sequences * group.tokens for group in step.decode)
    assert padded <= 2 * sum(-(-each // 16) * 16 for each in tokens)
    assert sorted(row for group in step.decode for row in group.rows.tolist()) == [0, 1, 2, 3]
