"""Look-ups of whole prompts: which of their blocks lie below HBM. A few dictionary steps a block, about 0.3 us.

Keys and tokens are the prompt's, block by block from its very first. Equal keys are a claim: tokens and parents are
compared, and what comes after another lineage's block is not this prompt's.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockHash, BlockId
from kvcontrol.kv_runtime.residency import Residency

_DDR: Final = CacheTier.DDR


class Run(NamedTuple):
    """Blocks that follow one another in a prompt; ``collided``: the next is another's under an equal key."""

    block_ids: list[BlockId]
    collided: bool


class Survey(NamedTuple):
    """Blocks of a path that can be read, and the places of those that neither are resident nor arrive."""

    readable: list[BlockId]
    missing: list[int]
    collided: bool


def find_run(residency: Residency, keys: Sequence[BlockHash], tokens: Sequence[bytes], first: int, limit: int) -> Run:
    """Return the blocks that can be read, from block ``first`` on, up to the first that can't."""
    found: list[BlockId] = []
    parent = keys[first - 1] if first else None
    for key, own, block in residency.of_keys(keys[first:limit], tokens[first:limit]):
        if block is None or not (_DDR in block.copies or block.readable):
            break
        record = block.record
        if record.tokens != own or record.parent != parent:
            return Run(found, collided=True)
        found.append(block.block_id)
        parent = key
    return Run(found, collided=False)


def survey_path(residency: Residency, keys: Sequence[BlockHash], tokens: Sequence[bytes], limit: int) -> Survey:
    """Return what is and what isn't there of a prompt's first ``limit`` blocks, up to another's block."""
    readable: list[BlockId] = []
    missing: list[int] = []
    parent = None
    for place, (key, own, block) in enumerate(residency.of_keys(keys[:limit], tokens[:limit])):
        if block is None:
            missing.append(place)
        else:
            record = block.record
            if record.tokens != own or record.parent != parent:
                return Survey(readable, missing, collided=True)
            if _DDR in block.copies or block.readable:
                readable.append(block.block_id)
        parent = key
    return Survey(readable, missing, collided=False)
