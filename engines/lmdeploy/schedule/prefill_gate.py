"""Long prompts that wait beside a chunk: matched once, not again at every step.

While one long prompt is computed in chunks, LMDeploy tries at each step whether a waiting one has become short: it
matches the prompt against the block trie, block by block, and takes that back. Three waiting prompts of 84,000 tokens
kept an H200 idle for 20 ms before each chunk. A match can only get longer where the block behind its end has come into
the trie. So the end is remembered, with the name of that block, and until the trie has it the prompt is taken for as
long as it was found to be. What was evicted meanwhile makes it longer, not shorter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from engines.control.guard import Guard

_MATCHED: Final = "kvgate_gate_match"


@dataclass(frozen=True, slots=True)
class _Matched:
    """Where a prompt's match ended: the node, the tokens before it, and the key of the block that was missing."""

    node: Any
    tokens: int
    missing: Any


def try_match_prefix_for_prefill_gate(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """``_PrefillAdmissionAttempt._try_match_prefix_for_prefill_gate``: False, too, where a match would find no more."""
    guard = Guard("the gate of long prompts")

    def _try_match_prefix_for_prefill_gate(self: Any) -> bool:
        seq, prefill = self.seq, self.prefill_scheduler
        if guard("recall a match", False, _is_still_long, seq, prefill):  # noqa: FBT003 - what it returns then
            return False
        was_matched = original(self)
        if was_matched and prefill._prefill_kv_token_limit(seq) is not None:  # noqa: SLF001 - the gate's own question
            guard("note a match", None, _remember, seq, prefill.block_trie)
        return was_matched

    return _try_match_prefix_for_prefill_gate


def _is_still_long(seq: Any, prefill: Any) -> bool:
    matched: _Matched | None = getattr(seq, _MATCHED, None)
    if matched is None or not matched.node.is_attached_or_root() or matched.missing in matched.node.children:
        return False
    left_tokens = int(seq.num_valid_ids) - max(matched.tokens, int(seq.num_history_ids))
    return left_tokens > int(prefill._long_context_chunk_limit(seq))  # noqa: SLF001


def _remember(seq: Any, trie: Any) -> None:
    """Note where the match that was just made ended, if a whole block of the prompt is behind it."""
    node, size = seq.prefix_cache.trie_cursor, trie.block_size
    begin = node.prefix_len
    if begin + size >= seq.num_valid_ids:
        return
    identity = seq.get_prefix_cache_extra_identity(begin, begin + size)
    missing = trie._hash_block(seq.history_cache[begin : begin + size], identity)  # noqa: SLF001
    setattr(seq, _MATCHED, _Matched(node, begin, missing))
