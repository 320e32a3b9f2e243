"""What is measured of an engine is what a profile's [measured] says, or a message why not."""

import asyncio
import tomllib

import pytest

from engines.models.tiny import build_tiny
from engines.sim.faults import Faults
from engines.sim.measure import main
from engines.sim.text import SimTokenizer
from tests.support.simulated_instance import simulated

SLOW = 0.02


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SimTokenizer:
    return SimTokenizer(build_tiny(tmp_path_factory.mktemp("models") / "tiny-llama"))


async def test_a_simulated_engine_is_measured_as_its_profile_has_it(
    tokenizer: SimTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--tokens", "40,640", "--contexts", "32", "--batches", "1", "--vocabulary", "100"]
    async with simulated(tokenizer, faults=Faults(slow=SLOW)) as engine:
        counters, model = engine.instance.engine.counters, engine.instance.spec.profile.time
        status = await asyncio.to_thread(
            # What the engine says it was busy: the wall of a busy machine would be another.
            lambda: main([engine.url, "--model", "m", "--answer", "16", *sizes], clock=lambda: counters.busy_s)
        )
    said = capsys.readouterr()
    assert status == 0, said.err
    measured = tomllib.loads(said.out)["measured"]
    assert [(each["tokens"], each["cached"]) for each in measured["prefill"]] == [
        (40, 0),
        (40, 32),
        (640, 0),
        (640, 624),
    ]
    for each in measured["prefill"]:
        expected_s = model.prompt_s(each["tokens"] - each["cached"], each["cached"], 8192) * SLOW
        assert each["seconds"] == pytest.approx(expected_s, rel=1e-3)
    (decode,) = measured["decode"]
    assert (decode["batch"], decode["context"]) == (1, 40)
    assert decode["seconds"] == pytest.approx(model.span_s(1, 1, 40) * SLOW, rel=1e-3)


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
