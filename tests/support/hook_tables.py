"""Every table of hooks that the package exports, as one list."""

from inspect import signature

from engines.lmdeploy import hooks
from engines.lmdeploy.cpu.resources import CpuResources
from engines.lmdeploy.patching import Hook


def all_hooks(resources: CpuResources) -> list[Hook]:
    """Return every hook of every table."""
    tables = [getattr(hooks, name) for name in hooks.__all__]
    return [hook for table in tables for hook in (table(resources) if signature(table).parameters else table())]


__all__ = ["all_hooks"]
