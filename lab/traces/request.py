"""One request of a trace, as a cache of blocks sees it."""

from array import array
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt: the ids of its blocks in order, how many tokens a block has, how many the prompt, and when it came.

    ``output_tokens`` is the answer's length, None where the trace doesn't say; ``session`` whose it is, "" likewise.
    Ids are chained: equal ids stand for equal content with equal content before it. The last block may be partial.
    """

    block_ids: "array[int]"
    block_tokens: int
    prompt_tokens: int
    at_s: float
    output_tokens: int | None = None
    session: str = ""
