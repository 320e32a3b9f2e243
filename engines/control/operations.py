"""The operations of ``/kv/v1`` by name, as they travel from an engine's server to where its blocks are."""

from collections.abc import Callable
from typing import Final

STATS: Final = b"stats"
SNAPSHOT: Final = b"snapshot"
POLICY: Final = b"policy"
SET_POLICY: Final = b"set_policy"
BLOCKS: Final = b"blocks"
MIGRATE: Final = b"migrate"
QUOTAS: Final = b"quotas"
SET_QUOTA: Final = b"set_quota"
RESET: Final = b"reset"
PREFIXES: Final = b"prefixes"
PIN: Final = b"pin"
UNPIN: Final = b"unpin"
INVALIDATE: Final = b"invalidate"

Operation = Callable[[bytes], bytes]
"""Returns the answer to a request's body, both JSON. Raises ``RefusedError`` for what the client can mend."""
