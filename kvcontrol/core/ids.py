"""Names for the things that are passed around as bare strings, bytes and numbers."""

from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""16 bytes: the identity of one full block *and of everything before it* (see ``hashing``)."""

BlockId = NewType("BlockId", int)
"""A block as one pool, runtime or policy numbers it; means nothing outside of it."""

InstanceId = NewType("InstanceId", str)
"""An engine instance as operators name it; stable over restarts."""

Epoch = NewType("Epoch", str)
"""One life of one engine process; what was learned in an earlier epoch is void."""

Seq = NewType("Seq", int)
"""The number of an event batch within an epoch; starts at 0 and has no holes."""
