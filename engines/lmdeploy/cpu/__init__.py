"""LMDeploy's PyTorch engine on a machine without a GPU."""

from engines.lmdeploy.cpu.activation import CpuActivationError, activate
from engines.lmdeploy.cpu.resources import CpuResources

__all__ = ["CpuActivationError", "CpuResources", "activate"]
