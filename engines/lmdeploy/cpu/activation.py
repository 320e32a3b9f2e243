"""Turning the CPU back end on: once per process, and only where there is no CUDA."""

from engines.lmdeploy.compat import require_known_good
from engines.lmdeploy.cpu.resources import CpuResources
from engines.lmdeploy.patching import install

_active: CpuResources | None = None  # hooks are a fact about the process, so this is too


class CpuActivationError(RuntimeError):
    """The CPU back end can't be activated in this process; the message has the reason."""


def activate(resources: CpuResources | None = None) -> None:
    """Make LMDeploy's PyTorch engine accept and default to the device ``cpu`` in this process.

    A second call does nothing when it asks for the same resources. Raises ``CpuActivationError`` where CUDA is
    available (its stand-ins would break the real device) or when other resources are asked for than those active,
    ``IncompatibleEngineError`` for versions that aren't known good, ``HookMismatchError`` when a private symbol moved.
    In each case nothing was changed.
    """
    global _active  # noqa: PLW0603
    import torch

    from engines.lmdeploy.hooks import cpu_hooks, torch_hooks

    if _active is not None:
        if resources is not None and resources != _active:
            raise CpuActivationError(f"the CPU back end is active with {_active}; {resources} needs another process")
        return
    if torch.cuda.is_available():
        raise CpuActivationError("CUDA is available here: the CPU back end replaces parts of torch.cuda and is refused")
    require_known_good()
    wanted = resources or CpuResources.of_this_machine()
    undo = install(torch_hooks(wanted))
    try:
        install(cpu_hooks(wanted))
    except BaseException:
        undo()
        raise
    # The model computes on a thread of its own (agent.py); a second team of OpenMP workers would only get in its way.
    torch.set_num_threads(1)
    _active = wanted
