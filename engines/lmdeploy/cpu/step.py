"""Data of the batch that every layer of one forward needs, computed once.

A forward is either a *decode* (one new token per sequence) or *spans* (prefill, chunks, anything longer). Page indices
and masks are the same for all layers, so they are built here and only applied in ``attention.py``.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Sequences of similar length, padded to a common number of pages.

    ``rows`` are their places in the batch (None: the whole batch in order); ``mask`` is added to the scores (None when
    there is a single sequence, whose tokens are cut to ``tokens`` instead).
    """

    rows: Any | None
    sequences: int
    pages: Any
    tokens: int
    mask: Any | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A sequence's new tokens ``[start, start + new_tokens)`` of the batch, seeing ``tokens`` in all.

    ``fresh`` says that nothing was cached before; ``mask`` is None for a plain causal square or a single token.
    """

    start: int
    new_tokens: int
    tokens: int
    pages: Any
    mask: Any | None

    @property
    def fresh(self) -> bool:
        return self.new_tokens == self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward: the slot of every new token, and either decode groups or spans."""

    page: Any
    offset: Any
    decode: tuple[DecodeGroup, ...]
    spans: tuple[Span, ...]


def plan_step(*, page_tokens: int, page_table: Any, new_tokens: list[int], tokens: list[int], dtype: Any) -> Step:
    """Plan a forward over sequences with ``new_tokens[i]`` new of ``tokens[i]`` tokens.

    ``page_table`` is ``[sequences, pages]``; entries past a sequence's end may hold any valid page.
    """
    table = page_table.long()
    if max(new_tokens) == 1:
        last = torch.tensor(tokens) - 1
        page = table.gather(1, (last // page_tokens)[:, None])[:, 0]
        groups = _decode_groups(page_tokens, table, tokens, dtype)
        return Step(page=page, offset=last % page_tokens, decode=groups, spans=())
    pages, offsets, spans = [], [], []
    start = 0
    for row, (new, seen) in enumerate(zip(new_tokens, tokens, strict=True)):
        position = torch.arange(seen - new, seen)
        pages.append(table[row][position // page_tokens])
        offsets.append(position % page_tokens)
        mask = None
        if 1 < new < seen:
            hidden = torch.arange(seen)[None, :] > position[:, None]
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        count = -(-seen // page_tokens)
        spans.append(Span(start=start, new_tokens=new, tokens=seen, pages=table[row, :count], mask=mask))
        start += new
    return Step(page=torch.cat(pages), offset=torch.cat(offsets), decode=(), spans=tuple(spans))


def _decode_groups(page_tokens: int, table: Any, tokens: list[int], dtype: Any) -> tuple[DecodeGroup, ...]:
    """Group sequences whose page counts are within a factor of two, so that padding at most doubles the work."""
    counts = [-(-seen // page_tokens) for seen in tokens]
    if len(tokens) == 1:
        only = DecodeGroup(rows=None, sequences=1, pages=table[0, : counts[0]], tokens=tokens[0], mask=None)
        return (only,)
    buckets: dict[int, list[int]] = {}
    if max(counts) <= 2 * min(counts):
        buckets[0] = list(range(len(tokens)))
    else:
        for row, count in enumerate(counts):
            buckets.setdefault(count.bit_length(), []).append(row)
    groups = []
    for rows in buckets.values():
        width = max(counts[row] for row in rows)
        index = torch.tensor(rows)
        length = torch.tensor([tokens[row] for row in rows])
        hidden = torch.arange(width * page_tokens)[None, :] >= length[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        groups.append(
            DecodeGroup(
                rows=None if len(buckets) == 1 else index,
                sequences=len(rows),
                pages=table[index, :width].flatten(),
                tokens=width * page_tokens,
                mask=mask[:, None, None, :],
            )
        )
    return tuple(groups)
