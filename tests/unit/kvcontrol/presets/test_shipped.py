"""The presets that come along: whole, explained, and true to what is shipped."""

import re
from importlib.resources import files
from itertools import product

import pytest

from kvcontrol.presets import Evidence, Presets
from kvcontrol.presets.catalogue import FILE
from kvcontrol.presets.parts import HARDWARE_KEYS, WORKLOAD_KEYS

TEXT = files("kvcontrol.presets").joinpath(FILE).read_text(encoding="utf-8")
SHIPPED = Presets.shipped()
KV_BYTES_PER_TOKEN_8B = 147_456
POOL_TOKENS_8B = 355_000


def test_the_workloads_and_the_hardware_that_were_promised_are_there() -> None:
    assert list(SHIPPED.workloads) == [
        *("long-context-32k", "long-context-64k", "long-context-128k", "throughput", "low-latency"),
    ]
    assert list(SHIPPED.hardware) == [
        *("nvidia-h100", "ascend-910b", "cambricon-mlu590", "hygon-dcu-k100", "kunlunxin-p800", "cpu"),
    ]


def test_each_value_is_explained_beside_it() -> None:
    bare = [
        line
        for line in TEXT.splitlines()
        if re.match(r"\s*\w+: *[^\s#]", line) and not re.search(r"\S  # \w.{3,}", line)
    ]
    assert bare == []


def test_each_explanation_says_measured_only_of_what_is_not_listed_as_unmeasured() -> None:
    """The comment of a value that stands in ``not_measured`` never begins with "measured"."""
    part, section, claimed = "", "", set()
    for line in TEXT.splitlines():
        if found := re.match(r"  ([\w-]+):$", line):
            part, section = found[1], ""
        elif found := re.match(r"    (\w+):", line):
            section = found[1]
        key = re.match(r"\s+(\w+):.*# measured", line)
        if key:
            claimed.add((part, key[1] if line.startswith("    " + key[1]) else f"{section}.{key[1]}"))
    assert len(claimed) >= 10
    for name, each in {**SHIPPED.workloads, **SHIPPED.hardware}.items():
        assert [key for key in each.not_measured if (name, key) in claimed] == []


@pytest.mark.parametrize(("name", "hardware"), list(product(SHIPPED.workloads, SHIPPED.hardware)))
def test_every_preset_keeps_within_its_hardware(name: str, hardware: str) -> None:
    preset = SHIPPED.preset(name, hardware)
    bounds = SHIPPED.hardware[hardware].at_most
    assert bounds.max_batch_size is None or preset.max_batch_size <= bounds.max_batch_size
    assert bounds.ddr_bytes is None or preset.ddr.size_bytes <= bounds.ddr_bytes
    assert preset.nvme is None or bounds.nvme_bytes is None or preset.nvme.size_bytes <= bounds.nvme_bytes
    assert preset.evidence is not Evidence.NONE or set(HARDWARE_KEYS) <= set(preset.not_measured)
    assert preset.evidence is Evidence.MEASURED or set(WORKLOAD_KEYS) <= set(preset.not_measured)
    assert set(preset.values()) <= {*WORKLOAD_KEYS, *HARDWARE_KEYS, "nvme"}


@pytest.mark.parametrize("name", [name for name in SHIPPED.workloads if name.startswith("long-context")])
def test_long_contexts_fit_the_pool_and_a_few_of_them_fit_ddr(name: str) -> None:
    preset = SHIPPED.preset(name, "nvidia-h100")
    assert preset.max_batch_size * preset.context_tokens <= POOL_TOKENS_8B
    assert preset.ddr.size_bytes / KV_BYTES_PER_TOKEN_8B / preset.context_tokens >= 5


def test_only_one_card_was_measured() -> None:
    assert [name for name, part in SHIPPED.hardware.items() if part.evidence is Evidence.MEASURED] == ["nvidia-h100"]
    assert [name for name, part in SHIPPED.hardware.items() if part.evidence is Evidence.RUNS] == ["cpu"]


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "nvidia-h100"),
        ("NVIDIA H100 PCIe", "nvidia-h100"),
        ("NVIDIA A100-SXM4-80GB", None),
        ("", None),
    ],
)
def test_a_card_is_recognised_by_its_drivers_name(device: str, expected: str | None) -> None:
    assert SHIPPED.recognise(device) == expected
