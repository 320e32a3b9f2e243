"""A request's prompt, in the form that the tiers below HBM use."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcontrol.core.ids import BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Keys and tokens of its blocks from the first one, and its tenant.

    Every block has ``block_tokens``, but for the last, which has what is left of ``prompt_tokens``.
    """

    keys: Sequence[BlockHash]
    tokens: Sequence[bytes]
    tenant: str
    block_tokens: int
    prompt_tokens: int
