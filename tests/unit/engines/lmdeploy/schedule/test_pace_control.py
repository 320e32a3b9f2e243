"""Which pace an engine begins with, and that one which can't be is refused."""

from types import SimpleNamespace

import pytest

from engines.control.errors import RefusedError
from engines.lmdeploy.schedule.pace_control import PaceControl, pace_of_settings
from engines.lmdeploy.schedule.pacing import Pacer
from engines.lmdeploy.settings import EngineSettings
from kvcontrol.kv_policy.spec import parse_spec

OTHERS = {"prefill_share": 0.25, "overtaken_share": 1, "overlapped_tokens": 2048, "reserved_share": 0.18}
"""What ``itl_target`` is made with unless it is said otherwise."""


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in EngineSettings.model_fields:
        monkeypatch.delenv(f"KVGATE_ENGINE_{field.upper()}", raising=False)


def engine(*, role: str = "Hybrid", dp: int = 1) -> SimpleNamespace:
    config = SimpleNamespace(role=SimpleNamespace(name=role), dp=dp)
    return SimpleNamespace(engine_config=config, scheduler=SimpleNamespace(kvgate_pacer=Pacer()))


@pytest.mark.parametrize(
    ("settings", "on_gpu", "name", "parameters"),
    [
        ({}, False, "alternate", {}),
        ({}, True, "itl_target", {"itl_target_ms": 55.0}),
        ({"itl_target_ms": 0}, True, "alternate", {}),
        ({"itl_target_ms": 300}, False, "itl_target", {"itl_target_ms": 300.0}),
        ({"pace": "lmdeploy", "itl_target_ms": 30}, True, "lmdeploy", {}),
        (
            {"pace": "itl_target(prefill_share=0.5)", "itl_target_ms": 30},
            True,
            "itl_target",
            {"itl_target_ms": 30.0, "prefill_share": 0.5},
        ),
        ({"pace": "itl_target(itl_target_ms=20)", "itl_target_ms": 30}, True, "itl_target", {"itl_target_ms": 20.0}),
    ],
)
def test_the_pace_is_what_is_set_or_else_goes_by_the_device(
    settings: dict[str, object],
    on_gpu: bool,  # noqa: FBT001
    name: str,
    parameters: dict[str, float],
) -> None:
    choice = pace_of_settings(EngineSettings(**settings), on_gpu=on_gpu)  # type: ignore[arg-type]
    assert (choice.name, dict(choice.parameters)) == (name, parameters)


@pytest.mark.parametrize("kind", [engine(role="Prefill"), engine(dp=2)])
def test_an_engine_that_only_computes_prompts_or_is_one_of_a_group_is_not_paced(kind: SimpleNamespace) -> None:
    operations = PaceControl(kind)
    with pytest.raises(RefusedError, match="allowed is lmdeploy"):
        operations.swap(parse_spec("alternate"), counts=True)
    operations.swap(parse_spec("lmdeploy"), counts=True)
    found = operations.in_charge()
    assert found is not None
    assert found.name == "lmdeploy"


def test_the_same_pace_again_changes_nothing_and_another_is_counted() -> None:
    operations = PaceControl(engine())
    operations.swap(parse_spec("itl_target(itl_target_ms=40)"), counts=False)
    operations.swap(parse_spec("itl_target(itl_target_ms=40, prefill_share=0.25)"), counts=True)
    found = operations.in_charge()
    assert found is not None
    assert found.pace is not None
    assert (found.pace.swaps, found.pace.target_s, found.params) == (0, 0.04, {"itl_target_ms": 40.0})
    assert found.effective_params == {"itl_target_ms": 40.0} | OTHERS
    operations.swap(parse_spec("alternate"), counts=True)
    found = operations.in_charge()
    assert found is not None
    assert found.pace is not None
    assert (found.name, found.pace.swaps, found.pace.target_s) == ("alternate", 1, 0.0)
