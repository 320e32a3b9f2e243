"""When a tier of engines writes a block to NVMe."""

from enum import StrEnum


class WriteMode(StrEnum):
    """When a block is written to NVMe."""

    THROUGH = "write_through"
    """As soon as it is in DDR."""
    BACK = "write_back"
    """When DDR is past its high watermark and the block is the next to go."""
    SECOND_USE = "write_on_second_use"
    """When it is asked for again while it is in DDR."""
