"""Which operators LMDeploy builds models from on which device."""

from collections.abc import Callable
from functools import wraps
from typing import Any


def select(threads: int) -> Callable[[Any], Any]:
    """Wrap ``selector._get_backend``: the device ``cpu`` gets the operators for ``threads``."""

    def replace(original: Any) -> Any:
        @wraps(original)
        def get_backend() -> Any:
            from lmdeploy.pytorch.devices import get_device_manager

            if get_device_manager().current_context().device_type != "cpu":
                return original()
            from engines.lmdeploy.cpu.backend import backend_for

            return backend_for(threads)

        return get_backend

    return replace
