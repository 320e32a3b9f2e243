"""What the prefix index stores and what it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType, overload

from kvcontrol.core import BlockHash

EntryId = NewType("EntryId", int)
"""Names one inserted prefix for as long as its index lives; never used again."""

LeaseId = NewType("LeaseId", int)
"""Names one ``acquire`` until its ``release``."""


class LeadingIds(Sequence[int]):
    """The first ``length`` of ``ids``, which several entries share; equal to the tuple of the same ids."""

    __slots__ = ("_ids", "_length")

    def __init__(self, ids: tuple[int, ...], length: int) -> None:
        self._ids = ids
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[int, ...]: ...
    def __getitem__(self, place: int | slice) -> int | tuple[int, ...]:
        if isinstance(place, slice):
            return tuple(self._ids[each] for each in range(self._length)[place])
        return self._ids[range(self._length)[place]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (tuple, LeadingIds)) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class HeldPrefix(NamedTuple):
    """An entry as its tail node knows it; the ids of its blocks are those on the way up."""

    entry_id: EntryId
    blocks: int
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixEntry:
    """A prefix whose KV exists: ``kv_block_ids[i]`` holds tokens ``i * block_size`` to ``(i + 1) * block_size``.

    ``token_length`` counts full blocks only; ``token_hash`` is the chained hash of the last of them.
    """

    entry_id: EntryId
    token_hash: BlockHash
    token_length: int
    kv_block_ids: Sequence[int]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """The answer to a look-up: ``matched_length`` tokens lie in ``kv_block_ids``, ``remaining_tokens`` do not.

    ``block_hashes`` name the matched blocks. ``confidence`` is 1.0 once tokens were compared and below 1.0 while only
    hashes were (see ``PrefixMatcher``). A miss is a hit of length 0.
    """

    matched_length: int
    confidence: float
    remaining_tokens: int
    kv_block_ids: tuple[int, ...] = ()
    block_hashes: tuple[BlockHash, ...] = ()

    @property
    def is_miss(self) -> bool:
        """True when not even the first block is held."""
        return self.matched_length == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Insertion:
    """What became of an insertion.

    ``entry`` is None when nothing could be held. ``redundant_block_ids`` are those of the caller's that the index did
    not take (held under another id already, or no room); ``evicted_block_ids`` had to leave. The caller may free both.
    """

    entry: PrefixEntry | None
    redundant_block_ids: tuple[int, ...]
    evicted_block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A verified hit whose blocks stay where they are until the lease is released."""

    lease_id: LeaseId
    hit: PrefixHit
