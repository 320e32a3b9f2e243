"""RMS norm in one torch call instead of eight."""

from typing import Any

import torch
from lmdeploy.pytorch.backends.default.norm import DefaultRMSNormImpl
from torch.nn.functional import rms_norm


class CpuRMSNorm(DefaultRMSNormImpl):
    """LMDeploy's RMS norm; half precision keeps LMDeploy's own way through float32."""

    def forward(self, x: Any, weight: Any, residual: Any = None) -> Any:
        """Return the norm of ``x``, or of ``x + residual`` together with that sum."""
        if x.dtype != torch.float32 or weight.dtype != torch.float32:
            return super().forward(x, weight, residual)
        if residual is None:
            return rms_norm(x, weight.shape, weight, self.eps)
        residual = x + residual
        return rms_norm(residual, weight.shape, weight, self.eps), residual
