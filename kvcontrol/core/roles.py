"""What an instance does of a request, and how KV gets from one instance to another."""

from enum import StrEnum


class EngineRole(StrEnum):
    """``HYBRID`` computes prompts and answers; ``PREFILL`` is there to compute prompts for others, ``DECODE`` to answer
    with prompts that others have computed.
    """

    HYBRID = "hybrid"
    PREFILL = "prefill"
    DECODE = "decode"


class KVTransport(StrEnum):
    """``MIGRATION``: the decoding engine reads the blocks out of the prefilling engine's memory. ``TIERS``: one saves
    them to tiers that both reach, the other loads them from there.
    """

    MIGRATION = "migration"
    TIERS = "tiers"
