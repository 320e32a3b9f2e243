"""From a prompt's tokens and a tenant's salt to the keys of its blocks, with prefixes that tenants chose to share.

Without sharing, a tenant's chain starts at its own salted root and meets nobody else's. A *shared prefix* is a run of
whole blocks under a name, put up for all on purpose (a public system prompt). A prompt that starts with it has those
blocks keyed under the name's own root, so that every tenant finds the same ones; right behind it the chain is tied to
the tenant's root again, so that what follows is private however it continues.
"""

from collections.abc import Callable
from typing import NamedTuple

from kvcontrol.core import BlockHash, CacheIdentity, IdentityError, chain_hashes, child_hash, root_hash
from kvcontrol.core.hashing import TOKEN_BYTES

ChainHasher = Callable[[BlockHash, bytes, int], list[BlockHash]]
"""``chain_hashes`` or, in tests, something weaker."""

_SHARED_ADAPTER = "kvgate.shared:"


class _Shared(NamedTuple):
    tokens: bytes
    root: BlockHash


class BlockKeys:
    """Keys of blocks under one cache identity; one writer (``share``/``unshare``), any number of readers."""

    def __init__(self, identity: CacheIdentity, *, hasher: ChainHasher = chain_hashes) -> None:
        self.identity = identity
        self._hasher = hasher
        self._shared: dict[str, _Shared] = {}
        self._longest_first: tuple[_Shared, ...] = ()

    @property
    def block_size_tokens(self) -> int:
        """Tokens in a block."""
        return self.identity.block_size_tokens

    def share(self, name: str, tokens: bytes) -> int:
        """Put a prefix up for all tenants under ``name`` and return how many of its blocks are shared (full ones).

        Prompts keyed before don't change their keys. Raises ``IdentityError`` for an empty or taken name, and for a
        prefix that fills no block.
        """
        if not name or name in self._shared:
            raise IdentityError(f"shared prefix name {name!r} is {'taken' if name else 'empty'}")
        width = self.block_size_tokens * TOKEN_BYTES
        blocks = len(tokens) // width
        if not blocks:
            raise IdentityError(
                f"shared prefix {name!r} has {len(tokens) // TOKEN_BYTES} tokens; at least one block of "
                f"{self.block_size_tokens} is needed"
            )
        root = root_hash(self.identity, adapter=_SHARED_ADAPTER + name)
        self._set({**self._shared, name: _Shared(tokens[: blocks * width], root)})
        return blocks

    def unshare(self, name: str) -> None:
        """Take a shared prefix back; raises ``IdentityError`` with the known names for one that isn't shared."""
        if name not in self._shared:
            known = ", ".join(sorted(self._shared)) or "none"
            raise IdentityError(f"no shared prefix is named {name!r}; shared are: {known}")
        self._set({key: value for key, value in self._shared.items() if key != name})

    def of(self, tokens: bytes, *, salt: str = "") -> list[BlockHash]:
        """Return the keys of a packed prompt's full blocks, in order; O(tokens + shared prefixes)."""
        root = root_hash(self.identity, salt=salt)
        for shared in self._longest_first:
            if tokens.startswith(shared.tokens):
                public = self._hasher(shared.root, shared.tokens, self.block_size_tokens)
                private = child_hash(root, b"", extra=public[-1])
                return public + self._hasher(private, tokens[len(shared.tokens) :], self.block_size_tokens)
        return self._hasher(root, tokens, self.block_size_tokens)

    def _set(self, shared: dict[str, _Shared]) -> None:
        """Replace both at once for readers: each is read once and never changed in place."""
        self._shared = shared
        self._longest_first = tuple(sorted(shared.values(), key=lambda each: len(each.tokens), reverse=True))


__all__ = ["BlockKeys", "ChainHasher"]
