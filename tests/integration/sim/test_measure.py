"""What is measured of an engine is what a profile's [measured] says, or a message why not."""

import asyncio
import tomllib

import pytest

from engines.models.tiny import build_tiny
from engines.sim.faults import Faults
from engines.sim.text import SimTokenizer
from lab.calibrate.measure import main
from tests.support.simulated_instance import simulated

SLOW = 0.02


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SimTokenizer:
    return SimTokenizer(build_tiny(tmp_path_factory.mktemp("models") / "tiny-llama"))


async def test_a_simulated_engine_is_measured_as_its_profile_has_it(
    tokenizer: SimTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--tokens", "8,160", "--contexts", "8", "--batches", "1", "--repeats", "1"]
    async with simulated(tokenizer, faults=Faults(slow=SLOW)) as engine:
        counters, model = engine.instance.engine.counters, engine.instance.spec.profile.time
        status = await asyncio.to_thread(
            # What the engine says it was busy: the wall of a busy machine would be another.
            lambda: main([engine.url, "--model", "m", "--answer", "16", *sizes], clock=lambda: counters.busy_s)
        )
    said = capsys.readouterr()
    assert status == 0, said.err
    measured = tomllib.loads(said.out)["measured"]
    block = 16
    short, short_again, long, long_again = measured["prefill"]
    assert short["tokens"] == short_again["tokens"] < long["tokens"] == long_again["tokens"]
    for cold, again in ((short, short_again), (long, long_again)):
        assert again["cached"] == (again["tokens"] - 1) // block * block
        assert cold["cached"] < block + 1  # no more than the template's own beginning
    for each in measured["prefill"]:
        expected_s = model.prompt_s(each["tokens"] - each["cached"], each["cached"], 8192) * SLOW
        assert each["seconds"] == pytest.approx(expected_s, rel=1e-3)
    (decode,) = measured["decode"]
    assert decode["batch"] == 1
    assert 16 < decode["context"] - 8 < 64  # eight words, each of a few of this tokenizer's tokens, and the template's
    assert decode["seconds"] == pytest.approx(model.span_s(1, 1, decode["context"]) * SLOW, rel=1e-3)


async def test_an_engine_that_can_not_be_timed_is_said(
    tokenizer: SimTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["http://127.0.0.1:9", "--model", "m"]) == 1
    assert "doesn't answer as an engine does" in capsys.readouterr().err
    async with simulated(tokenizer, faults=Faults(refuse=1.0)) as engine:
        assert await asyncio.to_thread(main, [engine.url, "--model", "m"]) == 1
    assert "503" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--tokens", "64,x"], ["--batches", "0"], ["--repeats", "0"]])
def test_sizes_that_can_not_be_are_said(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["http://127.0.0.1:9", "--model", "m", *option])
    assert option[0] in capsys.readouterr().err
