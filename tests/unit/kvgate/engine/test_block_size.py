"""Sizes of KV blocks that the engine can't run are refused before it starts."""

from pathlib import Path

import pytest

from engines.models.tiny import build_tiny
from kvcontrol.presets import Presets
from kvgate.engine.block_size import need_possible_block_size
from kvgate.failure import CommandError
from tests.support.command import typed

IMPOSSIBLE = [-16, 0, 1, 2, 8, 15, 17, 24, 48, 63, 65, 100, 1000, 8192, 1 << 20]
POSSIBLE = [None, 16, 32, 64, 128, 1024, 4096]


@pytest.mark.parametrize("tokens", POSSIBLE)
def test_powers_of_two_from_16_on_are_run(tokens: int | None) -> None:
    need_possible_block_size(tokens)


@pytest.mark.parametrize("tokens", IMPOSSIBLE)
def test_other_sizes_are_refused_with_what_is_allowed(tokens: int) -> None:
    with pytest.raises(CommandError, match=f"--block-size is {tokens}; the engine runs blocks of 16 to 4096 tokens"):
        need_possible_block_size(tokens)


@pytest.mark.parametrize("extra", [["--kernel-block-size", "16"], ["--tp", "1", "--kernel-block-size=16"]])
def test_with_a_size_for_kernels_multiples_of_16_are_run(extra: list[str]) -> None:
    need_possible_block_size(48, extra=extra)
    with pytest.raises(CommandError):
        need_possible_block_size(40, extra=extra)


def test_the_sizes_of_shipped_presets_are_run() -> None:
    presets = Presets.shipped()
    sizes = {presets.preset(name, hardware).block_tokens for name in presets.workloads for hardware in presets.hardware}
    assert sizes
    for tokens in sizes:
        need_possible_block_size(tokens)


@pytest.mark.parametrize("tokens", ["1", "0", "-1", "48"])
def test_the_commands_refuse_them(tmp_path: Path, tokens: str) -> None:
    model = build_tiny(tmp_path / "tiny")
    for command in (["engine", "--model", str(model)], ["up", "--model", str(model)]):
        answer = typed(*command, "--block-size", tokens, KVGATE_STATE_DIR=str(tmp_path))
        assert answer.code == 1, answer.err
        assert f"--block-size is {tokens}; the engine runs" in answer.err
