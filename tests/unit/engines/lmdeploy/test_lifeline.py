import asyncio
import multiprocessing
import multiprocessing.managers
from typing import Any

import pytest

from engines.lmdeploy.lifeline import ENGINE_DIED_EXIT_CODE, engine_loop, engine_process


async def _failing_loop(self: object) -> None:
    raise RuntimeError(f"{self} ran out of something")


def _run_failing_loop() -> None:
    asyncio.run(engine_loop(_failing_loop)("engine"))


def test_an_engine_process_whose_loop_fails_ends_with_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_run_failing_loop)
    process.start()
    process.join(120)
    assert process.exitcode == ENGINE_DIED_EXIT_CODE
    assert "the engine loop failed (RuntimeError: engine ran out of something)" in capfd.readouterr().err


def test_an_engine_in_its_users_own_process_raises() -> None:
    with pytest.raises(RuntimeError, match="engine ran out of something"):
        _run_failing_loop()


def test_the_engine_process_outlives_a_manager_that_is_shut_down_while_it_notifies() -> None:
    manager = multiprocessing.get_context("spawn").Manager()
    reached = []

    def publish(shared: Any, condition: Any, model_path: str) -> None:
        with condition:
            shared["port"] = 1
            condition.notify()
            manager.shutdown()
        reached.append(model_path)

    with manager:
        engine_process(staticmethod(publish)).__func__(manager.dict(), manager.Condition(), "model")
    assert reached == ["model"]
