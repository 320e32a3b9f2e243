"""Names of the blocks in LMDeploy's trie: the hashes that events and gateway know them by."""

from typing import Any, NamedTuple

import numpy as np

from engines.lmdeploy.trie.tenancy import salt_of_identity, without_salt
from kvcontrol.core.blocks import CacheIdentity
from kvcontrol.core.hashing import TOKEN_BYTES, chain_hashes, child_hash, root_hash
from kvcontrol.core.ids import BlockHash

HASH = "kvgate_hash"
"""The attribute of a trie's node that holds its block's name."""
_MAX_ROOTS = 65_536


class NamedPath(NamedTuple):
    """The events of a path of blocks (key, parent, tokens), worked out under ``identity``."""

    identity: CacheIdentity
    adapter: str
    blocks: list[tuple[BlockHash, BlockHash | None, bytes]]


class PathNames:
    """Names paths under one identity, with the root of each adapter and tenant remembered."""

    def __init__(self, identity: CacheIdentity) -> None:
        self.identity = identity
        self._roots: dict[tuple[str, str], BlockHash] = {}

    def named(self, nodes: list[Any], parent: Any) -> NamedPath | None:
        """Return the names of a path below ``parent``; None where the parent has no name, as its naming failed."""
        adapter = nodes[0].adapter_name or ""
        known: BlockHash | None
        if parent.block_id < 0:
            known, above = None, self._root(adapter, salt_of_identity(nodes[0].extra_identity))
        else:
            known = getattr(parent, HASH, None)
            if known is None:  # the parent's own failure was counted
                return None
            above = known
        packed = np.concatenate([node.token_ids for node in nodes]).astype("<u4").tobytes()
        size = self.identity.block_size_tokens
        width = size * TOKEN_BYTES
        tokens = [packed[start : start + width] for start in range(0, len(packed), width)]
        keys = self._keys(nodes, tokens, packed, above)
        return NamedPath(self.identity, adapter, list(zip(keys, [known, *keys], tokens, strict=False)))

    def _keys(self, nodes: list[Any], tokens: list[bytes], packed: bytes, above: BlockHash) -> list[BlockHash]:
        extras = [_extra(node.extra_identity) for node in nodes]
        if not any(extras):
            return chain_hashes(above, packed, self.identity.block_size_tokens)
        keys = []
        for block, extra in zip(tokens, extras, strict=True):
            above = child_hash(above, block, extra=extra)
            keys.append(above)
        return keys

    def _root(self, adapter: str, salt: str) -> BlockHash:
        key = (adapter, salt)
        root = self._roots.get(key)
        if root is None:
            if len(self._roots) >= _MAX_ROOTS:  # many tenants came and went
                self._roots.clear()
            root = self._roots[key] = root_hash(self.identity, salt=salt, adapter=adapter)
        return root


def _extra(extra_identity: tuple[Any, ...]) -> bytes:
    """What else than tokens and salt a block depends on, with every field's length: no two identities alike."""
    others = without_salt(extra_identity) if extra_identity else ()
    if not others:
        return b""
    return b"".join(
        f"{span.start}:{span.end}:{len(span.modality)}:{span.modality}{len(span.content_hash)}:{span.content_hash}".encode()
        for span in others
    )
