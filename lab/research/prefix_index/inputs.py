"""What an index accepts: checked before anything is changed, so that what is refused leaves no trace."""

import sys
from array import array
from collections.abc import Mapping, Sequence

from kvcontrol.core.shown import shown

MAX_METADATA_ITEMS = 16
MAX_METADATA_BYTES = 1_024
"""Of keys and values of one entry together, in UTF-8."""


def checked_capacity(capacity_blocks: int) -> int:
    """Return a capacity; raises ``ValueError`` unless it is a whole number > 0."""
    if type(capacity_blocks) is not int or capacity_blocks <= 0:
        raise ValueError(f"capacity_blocks is {capacity_blocks!r}; it must be a whole number > 0")
    return capacity_blocks


def checked_block_ids(kv_block_ids: Sequence[int], blocks: int) -> list[int]:
    """Return ``blocks`` block ids as plain integers; raises ``ValueError`` for another number of them, and for an id
    that is no integer of 64 bits.
    """
    if len(kv_block_ids) != blocks:
        raise ValueError(f"{len(kv_block_ids)} kv_block_ids for {blocks} full blocks")
    try:
        return array("q", tuple(kv_block_ids)).tolist()
    except (TypeError, OverflowError) as error:
        raise ValueError(f"kv_block_ids must be integers of 64 bits: {error}") from error


def checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Return a copy of an entry's metadata; raises ``ValueError`` unless it maps Unicode text to Unicode text within
    ``MAX_METADATA_ITEMS`` and ``MAX_METADATA_BYTES``.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise ValueError(f"metadata is {shown(metadata)}; it must map text to text")  # noqa: TRY004 - one error for bad input
    if len(metadata) > MAX_METADATA_ITEMS:
        raise ValueError(f"metadata has {len(metadata)} items; at most {MAX_METADATA_ITEMS} are allowed")
    size_bytes = 0
    for text in (each for item in metadata.items() for each in item):
        if not isinstance(text, str):
            raise ValueError(f"metadata has {shown(text)}; it must map text to text")  # noqa: TRY004 - as above
        try:
            size_bytes += len(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError(f"metadata has {shown(text)}, which is no Unicode text: {error.reason}") from None
    if size_bytes > MAX_METADATA_BYTES:
        raise ValueError(f"metadata has {size_bytes} bytes; at most {MAX_METADATA_BYTES} are allowed")
    return dict(metadata)


def checked_prompt_tokens(prompt_tokens: int, blocks: int, block_size_tokens: int) -> int:
    """Return a prompt's length; raises ``ValueError`` for one that is shorter than its full blocks."""
    if not prompt_tokens >= blocks * block_size_tokens:
        raise ValueError(f"prompt_tokens is {prompt_tokens} for {blocks} full blocks of {block_size_tokens} tokens")
    return prompt_tokens


def metadata_bytes(metadata: Mapping[str, str]) -> int:
    """Return what holding an entry's metadata costs, the texts' own objects included."""
    return sys.getsizeof(metadata) + sum(sys.getsizeof(text) for item in metadata.items() for text in item)
