from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.tiered_engine import NEW_TOKENS, PROMPTS, TieredEngine
from tests.support.transfer_faults import FaultPlan, install_faults


@pytest.fixture(scope="module")
def _hooks(_cpu_engine: None) -> Iterator[None]:
    from engines.lmdeploy.hooks import (
        event_hooks,
        eviction_hooks,
        interruption_hooks,
        key_hooks,
        schedule_hooks,
        step_hooks,
        tenant_hooks,
        tier_hooks,
        usage_hooks,
    )
    from engines.lmdeploy.patching import install

    undo = install(
        [
            *event_hooks(),
            *interruption_hooks(),
            *eviction_hooks(),
            *key_hooks(),
            *tenant_hooks(),
            *schedule_hooks(),
            *step_hooks(),
            *tier_hooks(),
            *usage_hooks(),
        ]
    )
    yield
    undo()


@pytest.fixture(scope="session")
def expected(tiny_llama: Path) -> list[list[int]]:
    """What an engine that never evicts, and has no hooks of ours, says."""
    with TieredEngine.start(tiny_llama, num_gpu_blocks=256) as plain:
        return [plain.run(prompt, new_tokens=NEW_TOKENS)[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def tier_settings(_hooks: None, expected: list[list[int]]) -> Iterator[pytest.MonkeyPatch]:  # noqa: ARG001 - it first
    """A DDR tier with room for everything, for engines that are started from now on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVGATE_ENGINE_DDR_BYTES", str(64 << 20))
        yield patch


@pytest.fixture(scope="module")
def _one_engine(tiny_llama: Path, tier_settings: pytest.MonkeyPatch) -> Iterator[TieredEngine]:  # noqa: ARG001
    with TieredEngine.start(tiny_llama) as tiered:
        yield tiered


@pytest.fixture
def tiered(_one_engine: TieredEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[TieredEngine]:
    """The module's engine with nothing cached anywhere; afterwards nothing may be left over.

    It tries every load, however slow one in an earlier test was: what that is worth is for other tests.
    """
    monkeypatch.setattr("kvcontrol.agent.PROBE_EVERY_S", 0.0)
    _one_engine.forget_all()
    yield _one_engine
    _one_engine.check()


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it with what shall go wrong from now on, with ``_`` for the dot in a place's name."""
    path = tmp_path / "faults.json"
    install_faults(FaultPlan(path), monkeypatch.setattr)
    return lambda **plan: FaultPlan.write(path, {place.replace("_", "."): fault for place, fault in plan.items()})
