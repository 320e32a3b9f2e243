"""Attention on CUDA: which kernels an instance runs, and why.

- ``decode.py``: decode attention over paged KV in equal pieces, two Triton kernels;
- ``paged.py``: when it serves instead of LMDeploy's own kernel, after it was compared with that;
- ``flash3.py``: FlashAttention-3 for prompts, found in the package that is installed;
- ``piecewise.py``: CUDA graphs of short prompts for models that LMDeploy doesn't mark for them.

Importing this package needs neither CUDA nor Triton.
"""

__all__: list[str] = []
