"""What one engine's prefix index does, whichever way it is built."""

from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from kvcontrol.core import BlockHash
from kvcontrol.prefix_reuse.metrics import PrefixReuseMetrics, PrefixReuseReport
from lab.research.prefix_index.entry import EntryId, Insertion, Lease, LeaseId, PrefixEntry, PrefixHit
from lab.research.prefix_index.keys import BlockKeys
from lab.research.prefix_index.matcher import Lineage, PrefixMatcher


class PrefixIndex(Protocol):
    """From a prompt's tokens to the KV blocks that already hold its beginning. Any thread.

    Tokens are packed (``hashing.token_bytes``). Made with the ``BlockKeys`` that name blocks and a bound in blocks.
    ``matcher`` verifies hits, ``metrics`` counts what happens.
    """

    keys: BlockKeys
    metrics: PrefixReuseMetrics
    matcher: PrefixMatcher

    def __len__(self) -> int:
        """Return the number of blocks held."""

    def lookup(self, tokens: bytes, *, salt: str = "") -> PrefixHit:
        """Return the longest held prefix of a prompt, by hash alone, and make it the youngest."""

    def lookup_keys(self, keys: Sequence[BlockHash], prompt_tokens: int) -> PrefixHit:
        """``lookup`` for a prompt whose block keys are known.

        Raises ``ValueError`` when ``prompt_tokens`` are fewer than the keys' blocks have.
        """

    def lookup_all(self, tokens: bytes, *, salt: str = "") -> tuple[PrefixEntry, ...]:
        """Return every inserted entry that the prompt starts with, tokens compared, shortest first.

        Changes no ages and counts as no look-up.
        """

    def report(self) -> PrefixReuseReport:
        """Return what was looked up and found, and what is held now."""

    def lineage_of(self, key: BlockHash) -> Lineage | None:
        """Return what a held block was computed from, None for an unknown key."""

    def insert(
        self, tokens: bytes, kv_block_ids: Sequence[int], *, salt: str = "", metadata: Mapping[str, str] | None = None
    ) -> Insertion:
        """Hold a prompt's full blocks; ``kv_block_ids`` has one id of 64 bits for each of them.

        Raises ``ValueError``, with nothing changed, for other ids, and for metadata that is no Unicode text or more
        than ``MAX_METADATA_ITEMS`` or ``MAX_METADATA_BYTES``. An entry that exists already keeps its metadata.

        Blocks that are held already keep their ids; the caller's are returned as redundant. Room is made by evicting
        the least recently used. The entry is shorter than the prompt where no room could be made (all is pinned) or
        where a block's key belongs to other tokens (a collision, counted); what is left out is redundant too. An
        insertion that holds nothing has no entry.
        """

    def acquire(self, tokens: bytes, *, salt: str = "") -> Lease:
        """Pin the longest held prefix whose *tokens* are equal, and return it; ``release`` it when done."""

    def release(self, lease_id: LeaseId) -> None:
        """Unpin what ``acquire`` pinned and make it the youngest; blocks invalidated meanwhile are gone.

        Raises ``KeyError`` for a lease that isn't held (any more).
        """

    def pin(self, entry_id: EntryId) -> None:
        """Keep an entry from eviction until as many ``unpin``; raises ``KeyError`` for one that isn't held."""

    def unpin(self, entry_id: EntryId) -> None:
        """Undo one ``pin``; raises ``KeyError`` for an entry that isn't held, ``ValueError`` for one not pinned."""

    def invalidate(self, key: BlockHash) -> tuple[int, ...]:
        """Forget a block and all below it, pinned or not, and return their block ids; none for an unknown key."""

    def evict_lru(self, blocks: int) -> tuple[int, ...]:
        """Forget up to ``blocks`` least recently used blocks, tails before heads, and return their ids; never pinned
        ones.
        """

    def dump(self) -> bytes:
        """Return all that is held as bytes; leases are not part of it: who held them is gone after a restart.

        Shared prefixes are not part of it either: they are the keys'. Equal contents and ages give equal bytes.
        """

    @classmethod
    def load(cls, data: bytes, keys: BlockKeys, *, capacity_blocks: int) -> Self:
        """Build an index with the same blocks, ages, entries (under new ids) and pins as the dumped one.

        Blocks that only leases pinned come back as the youngest. Of more blocks than ``capacity_blocks`` the oldest
        are left out. Raises ``WireError`` for damaged bytes, ``IdentityError`` for another identity's, ``ValueError``
        when pinned blocks alone exceed the capacity, and for a capacity that isn't a whole number > 0.
        """

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when what is held contradicts itself. O(everything)."""
