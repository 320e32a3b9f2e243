"""Applying rotary position embeddings in three torch calls for each of query and key."""

from typing import Any

import torch
from lmdeploy.pytorch.backends.default.apply_rotary_emb import DefaultApplyRotaryEmbImpl


class CpuApplyRotary(DefaultApplyRotaryEmbImpl):
    """``x * cos + rotate_half(x) * sin``, where rotating is a roll and the sign is moved into the sine.

    One object serves all layers: within a step they pass the same sine, so its sign is turned once.
    """

    def __init__(self) -> None:
        self._sin: Any = None
        self._signed: Any = None

    def forward(  # noqa: PLR0913, PLR0917 - LMDeploy's interface
        self,
        query: Any,
        key: Any,
        cos: Any,
        sin: Any,
        inplace: bool = True,  # noqa: FBT001, FBT002
        complex_mode: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """Return rotated query and key ``[tokens, heads, width]``; they are the arguments themselves when in place."""
        if complex_mode or cos.dim() != query.dim() - 1 or cos.size(-1) != query.size(-1):
            return super().forward(query, key, cos, sin, inplace, complex_mode)
        if not inplace:
            query, key = query.clone(), key.clone()
        cos, signed = cos.unsqueeze(-2), self._with_sign(sin)
        for states in (query, key):
            rolled = torch.roll(states, states.size(-1) // 2, -1)
            states.mul_(cos).addcmul_(rolled, signed)
        return query, key

    def _with_sign(self, sin: Any) -> Any:
        if self._sin is not sin:
            signed = sin.clone()
            signed[..., : sin.size(-1) // 2].neg_()
            self._sin, self._signed = sin, signed.unsqueeze(-2)
        return self._signed
