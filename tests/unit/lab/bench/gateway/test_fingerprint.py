"""The fingerprint benchmark times whole chats, and a new turn costs less than all of it."""

from pathlib import Path

from engines.models.tiny import build_tiny
from lab.bench.gateway.fingerprint import FingerprintPlan, run


def test_cold_prompts_turns_and_hashing_are_measured(tmp_path: Path) -> None:
    metrics = run(build_tiny(tmp_path / "tiny"), FingerprintPlan(repeats=1))
    assert {
        "cold_12k_ms",
        "turn_1k_on_12k_ms",
        "hash_12k_ms",
        "turn_1k_on_128k_ms",
        "encode_mb_per_s",
    } <= metrics.keys()
    assert all(value > 0 for value in metrics.values())
