"""What a KV block is: the tier it lies in, how it is stored, and what makes two blocks interchangeable."""

from dataclasses import dataclass
from enum import StrEnum

from kvcontrol.core.errors import IdentityError
from kvcontrol.core.ids import BlockId


class CacheTier(StrEnum):
    """Where a block's bytes lie, fastest first."""

    HBM = "HBM"
    DDR = "DDR"
    NVME = "NVME"
    REMOTE = "REMOTE"


class KVFormat(StrEnum):
    """The precision that keys and values are stored in."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    FP8 = "FP8"
    INT8 = "INT8"
    INT4 = "INT4"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBlockHandle:
    """A block as its holder sees it. ``ref_count`` requests share it; ``owner_request_id`` asked for it first."""

    block_id: BlockId
    tier: CacheTier
    size_bytes: int
    kv_format: KVFormat
    owner_request_id: str
    ref_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBlockInfo:
    """A block as an operator sees it; ``last_access_s`` is the runtime's monotonic clock."""

    block_id: BlockId
    tier: CacheTier
    size_bytes: int
    tenant_id: str
    last_access_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIdentity:
    """What must be equal for the KV of equal tokens to be equal bytes.

    ``model`` is the served name, ``revision`` a digest of the weights and of the configuration that they are computed
    with, ``kv_dtype`` the stored precision with its quantisation (``float32``, ``int8``...). ``adapters`` are pairs of
    a name and a digest of the adapter's contents, in order of name: each changes its own blocks and no others.
    ``block_size_tokens`` > 0; 0 <= ``tp_rank`` < ``tp_size``. Raises ``IdentityError`` when a field is out of range.
    """

    model: str
    revision: str
    kv_dtype: str
    block_size_tokens: int
    tp_size: int = 1
    tp_rank: int = 0
    adapters: tuple[tuple[str, str], ...] = ()

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
        names = [name for name, _ in self.adapters]
        if names != sorted(set(names)):
            raise IdentityError(f"cache identity: adapters are {names}; they must be in order, each named once")

    def adapter_revision(self, adapter: str) -> str:
        """Return the digest of an adapter's contents, empty for one that is not named."""
        return next((revision for name, revision in self.adapters if name == adapter), "")
