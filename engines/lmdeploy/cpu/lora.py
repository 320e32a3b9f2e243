"""LoRA adapters on a CPU: each sequence's rows through the two small matrices of its adapter, in plain torch."""

from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from lmdeploy.pytorch.backends.lora import AdapterInfo, LoRAImpl


class CpuLoRA(LoRAImpl):
    """Adds to a linear layer's output; neighbouring sequences with one adapter are one product."""

    def forward(  # noqa: PLR0913, PLR0917 - LMDeploy's
        self,
        x: torch.Tensor,
        lora_A: torch.Tensor,  # noqa: N803 - LMDeploy's
        lora_B: torch.Tensor,  # noqa: N803
        base_output: torch.Tensor,
        adapter_info: AdapterInfo,
        ctx_mgr: Any,
        colwise: bool,  # noqa: FBT001
        is_tp: bool = True,  # noqa: FBT001, FBT002
    ) -> torch.Tensor:
        """Return ``base_output`` with ``scaling * (x A^T) B`` added in place; adapter 0 is none and has rank 0."""
        del colwise, is_tp
        context = ctx_mgr.current_context()
        rows = x.flatten(0, -2)
        output = base_output[..., adapter_info.base_slice].flatten(0, -2)
        sequences = zip(context.local_adapter_ids.tolist(), context.q_seqlens.tolist(), strict=True)
        begin = 0
        for adapter, members in groupby(sequences, key=itemgetter(0)):
            end = begin + sum(tokens for _, tokens in members)
            if rank := int(adapter_info.ranks[adapter]):
                first = int(adapter_info.rank_offsets[adapter])
                down = rows[begin:end] @ lora_A[first : first + rank].T
                product = down @ lora_B[first : first + rank]
                output[begin:end] += product * adapter_info.scalings[adapter]
            begin = end
        return base_output
