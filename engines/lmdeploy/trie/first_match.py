"""How much of a prompt was cached: what its first look-up found, reported once.

LMDeploy counts a look-up again whenever a request that had to give up its blocks (recompute preemption) is admitted
again. By then the request's own blocks are in the prefix cache, so a prompt that the engine has computed counts as
cached; LMDeploy suppresses that for one look-up only, and not on every path. Here the count of a prompt is settled when
the prompt is admitted for the first time, after all tentative look-ups and loads before that; what is looked up later
changes neither the request's count nor the cache's statistics. A new turn of the same session has a count of its own.

One thread, the engine's.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

_FIRST = "kvgate_first_match"


class FirstMatch(NamedTuple):
    """What of the prompt that begins at ``step_start`` was cached."""

    step_start: int
    cached_tokens: int


def settle(seq: Any, cached_tokens: int) -> None:
    """Settle how much of a sequence's prompt was cached, unless that is settled already."""
    first = _first_of(seq)
    if first is None:
        first = FirstMatch(int(seq.input_start_pos), cached_tokens)
        setattr(seq, _FIRST, first)
    _restate(seq, first)


def _first_of(seq: Any) -> FirstMatch | None:
    first: FirstMatch | None = getattr(seq, _FIRST, None)
    return first if first is not None and first.step_start == int(seq.input_start_pos) else None


def _restate(seq: Any, first: FirstMatch) -> None:
    seq.cached_tokens = first.cached_tokens
    seq.prefix_cache.suppress_match_stats = True


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def finalize_match(original: Any) -> Any:
    """``BlockTrie.finalize_match``: a count that is settled stays."""
    function = original.__func__

    def finalize_match(seq: Any) -> None:
        first = _first_of(seq)
        if first is None:
            seq.prefix_cache.suppress_match_stats = False  # it was set for a request that has computed nothing yet
        function(seq)
        if first is not None:
            _restate(seq, first)

    return staticmethod(finalize_match)


def allocate_and_commit(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``_PrefillAdmissionAttempt._allocate_and_commit``: the prompt is admitted."""

    def _allocate_and_commit(self: Any) -> Any:
        result = original(self)
        settle(self.seq, int(self.seq.cached_tokens))
        return result

    return _allocate_and_commit
