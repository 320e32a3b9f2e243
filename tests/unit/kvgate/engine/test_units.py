import pytest

from kvgate.engine.instance import EngineLimits
from kvgate.engine.units import parse_bytes, parse_share, with_kv_memory
from kvgate.failure import CommandError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2**31),
        ("512MiB", 2**29),
        ("1.5G", 1_500_000_000),
        ("4096", 4096),
        (" 1 kib ", 1024),
        ("3gb", 3 * 10**9),
    ],
)
def test_amounts(text: str, expected: int) -> None:
    assert parse_bytes(text, option="--kv-memory") == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "0", "2 parsecs", "1e9"])
def test_what_is_no_amount_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(
        CommandError, match=r"--kv-memory is .*; expected an amount of memory, for example 512MiB or 2GiB"
    ):
        parse_bytes(text, option="--kv-memory")


def test_shares() -> None:
    assert parse_share("40%", option="--kv-memory") == 0.4
    for text in ("0%", "100%", "%", "-1%"):
        with pytest.raises(CommandError, match="a share of the GPU's free memory, for example 40%"):
            parse_share(text, option="--kv-memory")


def test_an_option_with_a_percent_sign_is_a_share() -> None:
    assert with_kv_memory(EngineLimits(), "40%").kv_share == 0.4
    assert with_kv_memory(EngineLimits(), "1GiB").kv_bytes == 2**30
    assert with_kv_memory(EngineLimits(), None) == EngineLimits()
