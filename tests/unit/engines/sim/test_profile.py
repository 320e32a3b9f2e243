"""Profiles say where their numbers come from, and what is wrong with a file."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from engines.sim.profile import (
    FOLDER,
    Measured,
    MeasuredDecode,
    MeasuredPrefill,
    ProfileError,
    load_profile,
    parse_profile,
    shipped,
)
from lab.calibrate.fit import fit, profile_errors, refit
from lab.calibrate.profile import main
from tests.support.simulated import TIME

WORST = {"h100-7b": 0.10, "h200-7b": 0.06, "h200-7b-lmdeploy": 0.03, "h200-8b": 0.16, "cpu-smollm2": 0.25}
"""How far each profile's model may be from any of its measurements."""


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_profiles_coefficients_are_the_fit_of_its_measurements(name: str) -> None:
    profile = load_profile(name)
    assert profile.summary
    assert profile.source
    assert refit(profile) == profile.time
    assert max(error.worst for error in profile_errors(profile).values()) < WORST[name]
    assert main([name]) == 0


@pytest.mark.parametrize("name", ["h100-7b", "h200-7b", "h200-8b"])
def test_a_step_of_sixteen_short_answers_takes_what_a_card_takes(name: str) -> None:
    time = load_profile(name).time
    assert time.span_s(1, 16, 16 * 200) < 0.0075
    assert time.span_s(1, 16, 16 * 200) - time.span_s(1, 1, 16 * 200) < 0.0005


def test_a_profile_says_what_it_is_not_to_be_used_for() -> None:
    assert "don't use TTFT p99" in load_profile("h200-7b").limits
    assert "estimates" in load_profile("h200-8b").limits


def test_a_fit_finds_the_model_that_made_the_measurements() -> None:
    prefill = tuple(
        MeasuredPrefill(tokens=tokens, cached=cached, seconds=TIME.prompt_s(tokens - cached, cached, 32))
        for tokens, cached in ((8, 0), (64, 0), (200, 0), (1000, 0), (1000, 990))
    )
    decode = tuple(
        MeasuredDecode(batch=batch, context=context, seconds=TIME.span_s(1, batch, batch * context))
        for batch, context in ((1, 10), (8, 10), (8, 1000), (2, 500))
    )
    found = fit(Measured(prefill=prefill, decode=decode), max_prefill_tokens=32)
    for name in TIME.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(TIME, name), rel=0.01)


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(ProfileError, match="1 measurements of prefill for 4 coefficients"):
        fit(Measured(prefill=(MeasuredPrefill(tokens=8, cached=0, seconds=1.0),)), max_prefill_tokens=32)


def _h100() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "h100-7b.toml").read_text())


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("engine", "max_batch"), 0, r"\[engine\] max_batch is 0"),
        (("engine", "max_batch"), "many", r"\[engine\] max_batch is 'many'; allowed is a int"),
        (("engine", "colour"), 1, r"\[engine\] has no 'colour'; allowed are block_tokens"),
        (("links", "ddr_to_hbm_bytes_per_s"), 0, r"\[links\] ddr_to_hbm_bytes_per_s is 0"),
        (("engine", "hbm_blocks"), 99999999999999, r"hbm_blocks is 99999999999999; allowed is 1 to 10,000,000"),
        (("links", "ddr_to_hbm_bytes_per_s"), float("inf"), r"ddr_to_hbm_bytes_per_s is inf; allowed is 1 to 1e\+18"),
        (("time", "token_s"), 1e300, r"token_s is 1e\+300; allowed is 0 to 3600 seconds"),
        (("time", "step_s"), -1.0, r"\[time\] step_s is -1.0"),
        (("colours",), {}, r"the file has no 'colours'"),
        (("engine", "nvme_blocks"), 5, "NVMe needs DDR"),
    ],
)
def test_what_is_wrong_with_a_profile_is_named(place: tuple[str, ...], value: object, message: str) -> None:
    said = _h100()
    if len(place) == 1:
        said[place[0]] = value
    else:
        said[place[0]][place[1]] = value
    with pytest.raises(ProfileError, match=message):
        parse_profile(said, path=Path("x.toml"))


def test_a_profile_that_lacks_something_says_what(tmp_path: Path) -> None:
    said = _h100()
    del said["links"]["ddr_to_hbm_bytes_per_s"]
    with pytest.raises(ProfileError, match="lacks something of ddr_to_hbm_bytes_per_s"):
        parse_profile(said, path=Path("x.toml"))
    with pytest.raises(ProfileError, match=r"unknown profile 'nothing'; known: .*h100-7b"):
        load_profile("nothing")
    (tmp_path / "bad.toml").write_text("= 3")
    with pytest.raises(ProfileError, match=r"bad.toml: it can't be read"):
        load_profile(str(tmp_path / "bad.toml"))


def test_the_same_memory_can_be_cut_into_other_blocks() -> None:
    shape = load_profile("h100-7b").engine
    larger = shape.with_block_tokens(512)
    assert (larger.block_tokens, larger.hbm_blocks, larger.block_bytes) == (512, 1810, 8 * shape.block_bytes)
