import pytest

from gateway.registry import LoadTracker
from kvcontrol.core import InstanceId

A, B = InstanceId("a"), InstanceId("b")


def test_a_request_counts_from_its_decision_to_its_end_however_it_ends() -> None:
    load = LoadTracker([A, B])
    with load.placed(A, uncached_tokens=100, cold=True) as permit:
        assert (load.of(A).in_flight, load.of(A).prefill_tokens) == (1, 100)
        assert load.answering(A) == 0
        permit.first_byte()
        permit.first_byte()
        assert (load.of(A).in_flight, load.of(A).prefill_tokens, load.answering(A)) == (1, 0, 1)
        with load.placed(A, uncached_tokens=0, cold=False) as computed:
            computed.first_byte()
            assert load.answering(A) == 2
    assert load.answering(A) == load.answering(B) == 0
    with pytest.raises(ValueError, match="x"), load.placed(A, uncached_tokens=100, cold=False):
        raise ValueError("x")
    assert (load.of(A).in_flight, load.of(A).prefill_tokens) == (0, 0)


def test_of_what_is_to_be_computed_prompts_of_more_than_a_chunk_count_apart_until_their_first_byte() -> None:
    load = LoadTracker()
    tally = load.tally(A)
    with load.placed(A, uncached_tokens=8192, cold=True), load.placed(A, uncached_tokens=8193, cold=True) as long:
        assert (tally.prefill_tokens, tally.chunked_tokens) == (16_385, 8193)
        long.first_byte()
        assert (tally.prefill_tokens, tally.chunked_tokens) == (8192, 0)
    assert tally.chunked_tokens == 0


def test_turns_number_all_requests_and_cold_ones_apart() -> None:
    load = LoadTracker([A, B])
    for instance, cold in ((A, True), (B, False), (A, False)):
        with load.placed(instance, uncached_tokens=0, cold=cold):
            pass
    assert (load.of(A).last_request, load.of(A).last_cold_request) == (3, 1)
    assert (load.of(B).last_request, load.of(B).last_cold_request) == (2, 0)
