"""``kvgate bench ab`` serves both sides the same requests and answers which is better, also by its exit code."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvgate.failure import CommandError
from lab.bench.command import build_bench

BLOCK = 512


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of five blocks: every second one is never repeated, the others are popular, one of them most."""
    lines = []
    for number in range(120):
        once = 1_000 + 10 * number
        first = (once, 0, once, 10 + 10 * (number // 4 % 10))[number % 4]
        lines.append(
            json.dumps(
                {
                    "timestamp": number * 2_000,
                    "input_length": 4 * BLOCK + 1,
                    "output_length": 2,
                    "hash_ids": [*range(first, first + 4), 100_000 + number],
                }
            )
        )
    path = tmp_path_factory.mktemp("traces") / "popular.jsonl"
    path.write_text("\n".join(lines))
    return path


def ab(trace: Path, *options: str) -> dict[str, Any]:
    command = ["ab", "--trace", str(trace), "--instances", "1", "--json", *options]
    result = CliRunner().invoke(build_bench(), command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    said: dict[str, Any] = json.loads(result.stdout)
    assert f"is {said['comparison'][0]['b_is']}" in result.stderr or "no difference is proven" in result.stderr
    return said


def test_a_larger_cache_is_proven_better_and_a_smaller_one_worse(trace: Path) -> None:
    small, large = "policy=lru hbm=24", "policy=lru hbm=400"
    found = ab(trace, "--a", small, "--b", large, "--expect", "better", "--repeats", "2")
    assert {row["figure"]: row["b_is"] for row in found["comparison"]}["found_ratio"] == "better"
    assert found["metrics"]["requests_count"] == 240
    assert found["metrics"]["answered_a_count"] == found["metrics"]["answered_b_count"] == 240
    with pytest.raises(CommandError, match=r"--expect not_worse: B \(policy=lru hbm=24\) is worse than A"):
        ab(trace, "--a", large, "--b", small, "--expect", "not_worse")


def test_equal_sides_are_a_tie_which_is_not_better(trace: Path) -> None:
    side = "policy=lru hbm=100"
    assert {row["b_is"] for row in ab(trace, "--a", side, "--b", side)["comparison"]} == {"tie"}
    with pytest.raises(CommandError, match="--expect better: no difference is proven"):
        ab(trace, "--a", side, "--b", side, "--expect", "better")


@pytest.mark.parametrize(
    ("side", "why"),
    [
        ("polcy=lru", "unknown setting 'polcy'; known: policy, routing"),
        ("policy", "'policy' is not written like name=value"),
        ("policy=lru policy=mq", "policy is set twice"),
        ("policy=best", "unknown policy 'best'"),
        ("routing=best", "unknown router 'best'"),
        ("instances=many", "instances is 'many'; expected a whole number above 0"),
        ("ddr=much", "ddr is 'much'; expected an amount of memory"),
        ("nvme=1TiB", "NVMe needs DDR"),
        (" ", "--b sets nothing"),
    ],
)
def test_settings_that_there_are_not_are_refused(trace: Path, side: str, why: str) -> None:
    with pytest.raises(CommandError, match=why):
        ab(trace, "--a", "policy=lru", "--b", side)


def test_the_settings_of_earlier_versions_are_read_with_a_line_that_has_the_new_ones(trace: Path) -> None:
    command = ["ab", "--trace", str(trace), "--instances", "1", "--limit", "40", "--json"]
    sides = ["--a", "policy=lru hbm=24", "--b", "policy=lru hbm=24 router=round_robin ddr=2"]
    result = CliRunner().invoke(build_bench(), [*command, *sides], catch_exceptions=False)
    assert result.exit_code == 0
    assert "kvgate: router= is deprecated: use routing=" in result.stderr
    assert "--b ddr 2, a multiple of HBM, is deprecated: use a size: " in result.stderr


def test_a_side_that_finds_nothing_is_refused_as_a(trace: Path) -> None:
    with pytest.raises(CommandError, match="found_ratio is 0 with A"):
        ab(trace, "--a", "policy=lru hbm=6", "--b", "policy=lru hbm=400")


def test_a_figure_that_there_is_not_is_refused(trace: Path) -> None:
    with pytest.raises(CommandError, match="unknown figure 'hits'; known: found_ratio"):
        ab(trace, "--a", "policy=lru", "--b", "policy=mq", "--figure", "hits")
