"""What a KV block is: the tier it lies in, and what makes two blocks interchangeable."""

from dataclasses import dataclass
from enum import StrEnum

from kvcontrol.core.errors import IdentityError


class CacheTier(StrEnum):
    """Where a block's bytes lie, fastest first."""

    HBM = "HBM"
    DDR = "DDR"
    NVME = "NVME"
    REMOTE = "REMOTE"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIdentity:
    """What must be equal for the KV of equal tokens to be equal bytes.

    ``model`` is the served name, ``revision`` a digest of the weights, ``kv_dtype`` the stored precision with its
    quantisation (``float32``, ``int8``...). ``block_size_tokens`` > 0; 0 <= ``tp_rank`` < ``tp_size``.
    Raises ``IdentityError`` when a field is out of range.
    """

    model: str
    revision: str
    kv_dtype: str
    block_size_tokens: int
    tp_size: int = 1
    tp_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("model", "revision", "kv_dtype"):
            if not getattr(self, name):
                raise IdentityError(f"cache identity: {name} is empty; it must name what the blocks were computed with")
        if self.block_size_tokens <= 0:
            raise IdentityError(f"cache identity: block_size_tokens is {self.block_size_tokens}; it must be > 0")
        if not 0 <= self.tp_rank < self.tp_size:
            raise IdentityError(
                f"cache identity: tp_rank is {self.tp_rank}; it must be >= 0 and < tp_size ({self.tp_size})"
            )


__all__ = ["CacheIdentity", "CacheTier"]
