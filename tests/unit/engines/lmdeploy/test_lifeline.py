import multiprocessing
import multiprocessing.managers
from typing import Any

from engines.lmdeploy.lifeline import engine_process


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
