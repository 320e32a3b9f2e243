"""LMDeploy's own block manager and block trie, without an engine around them."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

BLOCK_TOKENS = 4


class Paging:
    """A scheduler's paging objects, driven as it drives them: match, make room, allocate, free."""

    def __init__(self, blocks: int) -> None:
        from lmdeploy.pytorch.config import CacheConfig, SchedulerConfig
        from lmdeploy.pytorch.messages import SequenceMeta
        from lmdeploy.pytorch.paging.scheduler import Scheduler
        from lmdeploy.pytorch.strategies.ar.sequence import ARSequenceStrategy

        cache = CacheConfig(
            max_batches=64,
            block_size=BLOCK_TOKENS,
            num_cpu_blocks=0,
            num_gpu_blocks=blocks,
            enable_prefix_caching=True,
        )
        meta = SequenceMeta(BLOCK_TOKENS, strategy=ARSequenceStrategy())
        self.scheduler = Scheduler(SchedulerConfig(max_batches=64, max_session_len=4096), cache, meta)
        self.trie: Any = self.scheduler.block_trie
        self.blocks: Any = self.scheduler.block_manager
        self._sessions = count()

    @property
    def free(self) -> int:
        return int(self.blocks.get_num_free_gpu_blocks())

    def begin(
        self,
        tokens: Sequence[int],
        *,
        salt: str = "",
        urgency: Any = None,
        between: Callable[[Any], None] | None = None,
    ) -> Any | None:
        """Admit a request as LMDeploy's prefill does; None when there is no room for it.

        A salt takes the way of the tenancy hooks, which must be in place; an urgency is noted as theirs would.
        ``between`` is called with the sequence when it has its blocks and the trie doesn't have them yet.
        """
        import torch
        from lmdeploy.pytorch.messages import SamplingParam

        session = self.scheduler.add_session(next(self._sessions))
        sequence = session.add_sequence(torch.tensor(tokens), sampling_param=SamplingParam())
        if salt:
            sequence.sampling_param.kvgate_cache_salt = salt
        if urgency is not None:
            sequence.sampling_param.kvgate_urgency = urgency
        self.trie.match(sequence)
        missing = self.blocks.num_required_blocks(sequence) - self.free
        if missing > 0:
            self.trie.evict(missing)
        if not self.blocks.can_allocate(sequence):
            self.blocks.truncate(sequence, 0)
            return None
        self.blocks.allocate(sequence)
        if between is not None:
            between(sequence)
        self.trie.allocate(sequence)
        self.trie.finalize_match(sequence)
        return sequence

    def end(self, sequence: Any) -> None:
        self.blocks.free(sequence)

    def serve(self, tokens: Sequence[int], *, salt: str = "", urgency: Any = None) -> int:
        """A whole request; returns how many tokens it found cached."""
        sequence = self.begin(tokens, salt=salt, urgency=urgency)
        assert sequence is not None
        self.end(sequence)
        return int(sequence.cached_tokens)

    def held_prefix(self, tokens: Sequence[int]) -> int:
        """Count the leading blocks of a prompt that the trie holds, without touching them."""
        node, found = self.trie._roots.get(None), 0
        while node is not None and node.children:
            part = tuple(tokens[found * BLOCK_TOKENS : (found + 1) * BLOCK_TOKENS])
            node = next((child for child in node.children.values() if tuple(child.token_ids) == part), None)
            found += node is not None
        return found


def prompt(seed: int, blocks: int) -> list[int]:
    """Tokens that fill ``blocks`` blocks and one more token; prompts of other seeds share no block."""
    return [seed * 1_000 + place for place in range(blocks * BLOCK_TOKENS + 1)]
