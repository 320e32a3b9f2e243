"""What is replaced so that a request reports once how much of its prompt was cached."""

from engines.lmdeploy.hooks.names import TRIE
from engines.lmdeploy.patching import Hook


def usage_hooks() -> list[Hook]:
    """In the engine process, after every other hook on ``BlockTrie.finalize_match``: theirs change the count."""
    from engines.lmdeploy.trie import first_match

    return [
        Hook(
            target=f"{TRIE}.trie:BlockTrie.finalize_match",
            signature="(seq: lmdeploy.pytorch.messages.SchedulerSequence) -> None",
            replace=first_match.finalize_match,
            why="a request that was preempted finds its own blocks, and reported its computed prompt as cached",
        ),
        Hook(
            target="lmdeploy.pytorch.paging.prefill_scheduler:_PrefillAdmissionAttempt._allocate_and_commit",
            signature="(self)",
            replace=first_match.allocate_and_commit,
            why="from here on a prompt is computed: its cached tokens are final",
        ),
    ]
