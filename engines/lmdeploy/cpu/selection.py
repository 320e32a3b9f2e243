"""Which operators LMDeploy builds models from on which device."""

from functools import wraps
from typing import Any


def select(original: Any) -> Any:
    """Wrap ``selector._get_backend``: the device ``cpu`` gets ``CpuOpsBackend``."""

    @wraps(original)
    def get_backend() -> Any:
        from lmdeploy.pytorch.devices import get_device_manager

        if get_device_manager().current_context().device_type != "cpu":
            return original()
        from engines.lmdeploy.cpu.backend import CpuOpsBackend

        return CpuOpsBackend

    return get_backend


__all__ = ["select"]
