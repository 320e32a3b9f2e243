"""From a prompt's tokens and a tenant's salt to the keys of its blocks, with prefixes that tenants chose to share.

Without sharing, a tenant's chain starts at its own salted root and meets nobody else's. A *shared prefix* is a run of
whole blocks under a name, put up for all on purpose (a public system prompt). A prompt that starts with it has those
blocks keyed under the name's own root, so that every tenant finds the same ones; right behind it a *private root*
starts the tenant's own chain, so that what follows is private however it continues.

- Shared are full blocks only. Of a prefix that ends within a block the rest is forgotten: the block that it would
  begin holds a tenant's own tokens too, and is private.
- A private root is keyed by the tenant's salt and names the last shared block. It is made as roots are
  (``root_hash``), not as blocks are: no block that a tenant could fill has its hash, at any block size.
- Of several shared prefixes that a prompt starts with, the longest counts, for the whole prompt; of equal ones under
  two names, the one shared first. Two shared prefixes have no blocks in common, also where one begins the other.
- Sharing and taking back change the keys of prompts from then on. What was held under the old keys isn't found any
  more, ages and is evicted; under the same name and tokens again it has the same keys again.
"""

from collections.abc import Callable
from typing import NamedTuple

from kvcontrol.core import BlockHash, CacheIdentity, IdentityError, chain_hashes, root_hash
from kvcontrol.core.hashing import TOKEN_BYTES

ChainHasher = Callable[[BlockHash, bytes, int], list[BlockHash]]
"""``chain_hashes`` or, in tests, something weaker."""

_SHARED_ADAPTER = "kvgate.shared:"
_BEHIND_ADAPTER = "kvgate.behind:"


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

        Raises ``IdentityError`` for a name that is empty, taken or no Unicode text, and for a prefix that fills no
        block; ``ValueError`` for tokens that aren't packed.
        """
        if not name or name in self._shared:
            raise IdentityError(f"shared prefix name {name!r} is {'taken' if name else 'empty'}")
        _must_be_packed(tokens)
        width = self.block_size_tokens * TOKEN_BYTES
        blocks = len(tokens) // width
        if not blocks:
            raise IdentityError(
                f"shared prefix {name!r} has {len(tokens) // TOKEN_BYTES} tokens; at least one block of "
                f"{self.block_size_tokens} is needed"
            )
        try:
            root = root_hash(self.identity, adapter=_SHARED_ADAPTER + name)
        except UnicodeEncodeError as error:
            raise IdentityError(f"shared prefix name {name!r} is no Unicode text: {error.reason}") from None
        self._set({**self._shared, name: _Shared(tokens[: blocks * width], root)})
        return blocks

    def unshare(self, name: str) -> None:
        """Take a shared prefix back; raises ``IdentityError`` with the known names for one that isn't shared."""
        if name not in self._shared:
            known = ", ".join(sorted(self._shared)) or "none"
            raise IdentityError(f"no shared prefix is named {name!r}; shared are: {known}")
        self._set({key: value for key, value in self._shared.items() if key != name})

    def of(self, tokens: bytes, *, salt: str = "") -> list[BlockHash]:
        """Return the keys of a packed prompt's full blocks, in order; O(tokens + shared prefixes).

        Raises ``ValueError`` for tokens that aren't packed, ``IdentityError`` for a salt that is too long or no
        Unicode text.
        """
        _must_be_packed(tokens)
        try:
            root = root_hash(self.identity, salt=salt)
        except UnicodeEncodeError as error:
            raise IdentityError(f"the salt is no Unicode text: {error.reason}") from None
        for shared in self._longest_first:
            if tokens.startswith(shared.tokens):
                public = self._hasher(shared.root, shared.tokens, self.block_size_tokens)
                private = root_hash(self.identity, salt=salt, adapter=_BEHIND_ADAPTER + public[-1].hex())
                return public + self._hasher(private, tokens[len(shared.tokens) :], self.block_size_tokens)
        return self._hasher(root, tokens, self.block_size_tokens)

    def _set(self, shared: dict[str, _Shared]) -> None:
        """Replace both at once for readers: each is read once and never changed in place."""
        self._shared = shared
        self._longest_first = tuple(sorted(shared.values(), key=lambda each: len(each.tokens), reverse=True))


def _must_be_packed(tokens: bytes) -> None:
    if len(tokens) % TOKEN_BYTES:
        raise ValueError(f"{len(tokens)} bytes are no packed tokens: each has {TOKEN_BYTES}")
