"""What a strategy reads of one of LMDeploy's sequences."""

from collections.abc import Container
from typing import Any

from engines.lmdeploy.schedule.uncached import known_left_tokens
from engines.lmdeploy.schedule.urgency import urgency_of_sequence
from engines.lmdeploy.trie.tenancy import salt_of_sequence
from kvcontrol.scheduler_ir.strategies import WaitingId, WaitingRequest


def waiting_id(seq: Any) -> WaitingId:
    """Return the id of a sequence in the waiting queue."""
    return WaitingId(str(int(seq.seq_id)))


def waiting_request(seq: Any, block_size: int, returned: Container[int]) -> WaitingRequest:
    """Return a waiting sequence with its urgency; ``block_size`` in tokens.

    Those that ``returned``, preempted or loaded, were at the front before: how long their prompt is counts no more.
    """
    urgency = urgency_of_sequence(seq)
    arrived_s = float(seq.arrive_time)
    answered = int(seq.num_new_tokens) > 0  # its first token has gone out
    due_s = None if answered or urgency.first_token_s is None else arrived_s + urgency.first_token_s
    return WaitingRequest(
        request_id=waiting_id(seq),
        arrived_s=arrived_s,
        prefill_tokens=0 if int(seq.seq_id) in returned else known_left_tokens(seq),
        priority=urgency.priority.level,
        deadline_s=due_s,
        model=seq.adapter_name or "",
        prefix=_prefix(seq, block_size),
    )


def _prefix(seq: Any, block_size: int) -> int:
    """Return a number that sequences share whose first block is the same, 0 where there is no whole block."""
    if seq.num_valid_ids <= block_size:
        return 0
    first = seq.history_cache[:block_size].tobytes()
    return hash((seq.adapter_name, salt_of_sequence(seq), first)) or 1
