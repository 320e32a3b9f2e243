"""A file that isn't what the schema allows is refused with file, line, key, value and what is allowed."""

import re
from importlib.resources import files
from pathlib import Path

import pytest

from kvcontrol.presets import PresetFileError, Presets
from kvcontrol.presets.catalogue import FILE

GOOD = """\
schema: 1
workloads:
  chat:
    summary: chats
    context_tokens: 4096
    max_batch_size: 8
    max_prefill_tokens: 1024
    load_deadline_s: 2
    ddr: {size: 1GiB, path: /dev/shm/ddr, high_watermark: 0.9, low_watermark: 0.8, policy: lru}
    nvme: {size: 2GiB, high_watermark: 0.9, low_watermark: 0.8, policy: lru, write_mode: write_back}
    quota: {guaranteed_share: 0.1, burst_share: 0.5}
    not_measured: [ddr.size]
hardware:
  card:
    summary: a card
    evidence: measured
    recognised_by: [Card]
    memory: 8GiB
    host_cores: 2
    block_tokens: 16
    hbm_share: 0.5
    load_deadline_s: 3
    engine: {device: cuda, kv_quantisation: fp8, piecewise_cudagraph_tokens: 64}
    at_most: {context_tokens: 2048, max_batch_size: 4, ddr: 512MiB, nvme: 1GiB}
    not_measured: all
"""


def complaints(old: str, new: str) -> list[str]:
    assert old in GOOD
    with pytest.raises(PresetFileError) as caught:
        Presets.parse(GOOD.replace(old, new, 1), file="mine.yaml")
    return str(caught.value).splitlines()


def test_a_good_file_is_read() -> None:
    presets = Presets.parse(GOOD, file="mine.yaml")
    assert presets.workloads["chat"].ddr.size_bytes == 2**30
    assert presets.hardware["card"].at_most.ddr_bytes == 2**29


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("schema: 1", "schema: 2", "mine.yaml:1: schema is 2; it must be a whole number from 1 to 1"),
        (
            "max_batch_size: 8",
            "max_batch_size: many",
            "mine.yaml:6: workloads.chat.max_batch_size is 'many'; it must be a whole number from 1 to 4096",
        ),
        (
            "max_batch_size: 8",
            "max_batch_size: true",
            "mine.yaml:6: workloads.chat.max_batch_size is True; it must be a whole number from 1 to 4096",
        ),
        (
            "    max_batch_size: 8\n",
            "",
            "mine.yaml:3: workloads.chat.max_batch_size is missing; it must be a whole number from 1 to 4096",
        ),
        (
            "size: 1GiB",
            "size: 1GB",
            "mine.yaml:9: workloads.chat.ddr.size is '1GB'; it must be a whole number of MiB, GiB or TiB, like 64GiB",
        ),
        (
            "path: /dev/shm/ddr",
            "path: shm/ddr",
            "mine.yaml:9: workloads.chat.ddr.path is 'shm/ddr'; it must be the absolute path of a file",
        ),
        ("policy: lru}", "policy: best}", "mine.yaml:9: workloads.chat.ddr.policy is 'best'; allowed: lru, fifo, lfu"),
        (
            "write_mode: write_back",
            "write_mode: write_never",
            "write_mode is 'write_never'; allowed: write_through, write_back, write_on_second_use",
        ),
        (
            "low_watermark: 0.8, policy: lru}",
            "low_watermark: 0.95, policy: lru}",
            "mine.yaml:9: workloads.chat.ddr.low_watermark is 0.95; it must not be above high_watermark (0.9)",
        ),
        (
            "high_watermark: 0.9, low",
            "high_watermark: .nan, low",
            "mine.yaml:9: workloads.chat.ddr.high_watermark is nan; it must be a number from 0.01 to 1",
        ),
        (
            "high_watermark: 0.9, low",
            "high_watermark: 1, low",
            "mine.yaml:9: workloads.chat.ddr.high_watermark is 1; with write_back it must be below 1",
        ),
        (
            "guaranteed_share: 0.1",
            "guaranteed_share: 0.6",
            "mine.yaml:11: workloads.chat.quota.guaranteed_share is 0.6; it must not be above burst_share (0.5)",
        ),
        (
            "load_deadline_s: 2\n",
            "load_deadline_s: 0\n",
            "mine.yaml:8: workloads.chat.load_deadline_s is 0; it must be a number from 0.001 to 600",
        ),
        (
            "max_prefill_tokens: 1024\n",
            "max_prefill_tokens: 1024\n    itl_target_ms: 0.5\n",
            "mine.yaml:8: workloads.chat.itl_target_ms is 0.5; it must be 0 (no target), or 1 or more",
        ),
        (
            "max_prefill_tokens: 1024\n",
            "max_prefill_tokens: 1024\n    itl_target_ms: -1\n",
            "mine.yaml:8: workloads.chat.itl_target_ms is -1; it must be a number from 0 to 60000",
        ),
        ("[ddr.size]", "[ddr.speed]", "mine.yaml:12: workloads.chat.not_measured.0 is 'ddr.speed'; allowed: "),
        (
            "evidence: measured",
            "evidence: true",
            "mine.yaml:16: hardware.card.evidence is True; allowed: measured, runs, none",
        ),
        (
            "device: cuda",
            "device: camb",
            "mine.yaml:23: hardware.card.engine.piecewise_cudagraph_tokens is 64; device camb has no CUDA graphs",
        ),
        ("kv_quantisation: fp8", "kv_quantisation: fp6", "is 'fp6'; allowed: none, int4, int8, fp8, fp8_e5m2"),
        (
            "host_cores: 2",
            "cores: 2",
            "mine.yaml:19: hardware.card.cores is not a known key; allowed: summary, evidence, ",
        ),
        ("summary: chats", "summary: 2024-01-01", "mine.yaml:4: workloads.chat.summary is 2024-01-01; allowed are"),
        ("summary: a card", "evidence: none", "mine.yaml:16: hardware.card.evidence is there twice, first on line 15"),
        ("quota: {", "quota: 3 #", "mine.yaml:11: workloads.chat.quota is 3; it must be a mapping of keys to values"),
        ("summary: chats", "summary: 2024-13-45", "mine.yaml:4: workloads.chat.summary is 2024-13-45; allowed are"),
        (
            "max_batch_size: 8",
            "max_batch_size: !!int many",
            "mine.yaml:6: workloads.chat.max_batch_size is many; allow",
        ),
        ("max_batch_size: 8", "max_batch_size: !!bool 7", "mine.yaml:6: workloads.chat.max_batch_size is 7; allowed"),
        ("max_batch_size: 8", "max_batch_size: " + "9" * 5_000, "max_batch_size is " + "9" * 80 + "; allowed are"),
        ("max_batch_size: 8", "max_batch_size: 0x" + "f" * 5_000, "max_batch_size is 0x" + "f" * 78 + "; allowed are"),
        ("summary: chats", "summary: " + "[" * 3_000, "mine.yaml:1: not YAML that can be read: it is nested too deep"),
        ("schema: 1", "schema: &one 1\nmore: *one", "mine.yaml:2: more is an alias; write the value out"),
        ("workloads:", "workloads: [", "mine.yaml:4: not YAML: "),
    ],
)
def test_what_is_not_allowed_is_named(old: str, new: str, expected: str) -> None:
    assert any(line.startswith(expected) or expected in line for line in complaints(old, new)), complaints(old, new)


def test_all_problems_are_told_at_once_in_the_files_order() -> None:
    lines = complaints("evidence: measured\n", "evidence: 3\n    speed: 4\n")
    assert [re.match(r"mine.yaml:(\d+)", line)[1] for line in lines] == ["16", "17"]  # type: ignore[index]


def test_a_mapping_that_holds_itself_ends_in_a_complaint() -> None:
    with pytest.raises(PresetFileError, match="is an alias"):
        Presets.parse("schema: 1\nworkloads: &all\n  chat: *all\nhardware: {}\n", file="mine.yaml")


@pytest.mark.parametrize("text", ["", "- 1\n", "just text"])
def test_a_file_that_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(PresetFileError, match=r"mine\.yaml:1: must be a mapping"):
        Presets.parse(text, file="mine.yaml")


def test_a_file_of_ones_own_is_read_and_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    with pytest.raises(PresetFileError, match=r"mine\.yaml: can't be read"):
        Presets.load(mine)
    mine.write_text(files("kvcontrol.presets").joinpath(FILE).read_text(encoding="utf-8"), encoding="utf-8")
    assert Presets.load(mine) == Presets.shipped()
    mine.write_bytes(b"\xff\xfe")
    with pytest.raises(PresetFileError, match="can't be read"):
        Presets.load(mine)
