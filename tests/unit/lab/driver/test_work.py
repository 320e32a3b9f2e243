"""A trace's requests become work of the chosen lengths, at the chosen times, with the same structure."""

from array import array

import pytest

from kvcontrol.traces import Words
from kvgate.failure import CommandError
from lab.driver.drive import sessions
from lab.driver.work import Lengths, Pace, plan
from lab.traces import Request

VOCABULARY = tuple(f"w{number}" for number in range(20))
WORDS = Words(words=VOCABULARY, message_tokens=10, context_tokens=4096)


def request(ids: list[int], tokens: int, at_s: float = 0.0, output: int | None = 100, session: str = "") -> Request:
    return Request(
        block_ids=array("q", ids),
        block_tokens=512,
        prompt_tokens=tokens,
        at_s=at_s,
        output_tokens=output,
        session=session,
    )


CHAT = [request([1, 2, 3], 1400, 5.0), request([1, 2, 4, 5], 2000, 7.0), request([9], 300, 13.0, None)]


def test_lengths_are_the_traces_own_and_times_count_from_the_first() -> None:
    work = plan(CHAT, WORDS, lengths=Lengths(output_tokens=7), pace=Pace())
    assert [each.prompt_tokens for each in work.requests] == [1400, 2000, 300]
    assert [each.output_tokens for each in work.requests] == [100, 100, 7]
    assert [each.at_s for each in work.requests] == [0.0, 2.0, 8.0]
    assert [each.reusable_tokens for each in work.requests] == [0, 1024, 0]
    for each in work.requests:
        assert len(work.content(each).split()) == each.prompt_tokens - 10 + 1, "one is the opener"


def test_scaled_lengths_keep_whole_blocks_whole() -> None:
    work = plan(CHAT, WORDS, lengths=Lengths(scale=0.1, most_output_tokens=9), pace=Pace())
    assert work.block_tokens == 51
    assert [each.prompt_tokens for each in work.requests] == [2 * 51 + 37, 3 * 51 + 46, 30]
    assert [each.output_tokens for each in work.requests] == [9, 9, 9]
    one, other = (work.content(each).split() for each in work.requests[:2])
    shared = next(place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    assert 2 * 51 <= shared - 1 <= 2 * 51 + 2


def test_the_pace_is_faster_or_a_rate_in_the_mean() -> None:
    assert [each.at_s for each in plan(CHAT, WORDS, lengths=Lengths(), pace=Pace(speed=4)).requests] == [0, 0.5, 2]
    assert [each.at_s for each in plan(CHAT, WORDS, lengths=Lengths(), pace=Pace(rate=2)).requests] == [0, 0.25, 1]
    with pytest.raises(CommandError, match=r"all 2 requests to be sent come at one moment of the trace \(3 s\)"):
        plan([request([1], 600, 3.0), request([2], 600, 3.0)], WORDS, lengths=Lengths(), pace=Pace(rate=2))
    assert [each.at_s for each in plan(CHAT[:1], WORDS, lengths=Lengths(), pace=Pace(rate=2)).requests] == [0]


def test_what_doesnt_fit_the_context_is_refused_with_what_would_or_left_out() -> None:
    requests = [*CHAT, request([1, 2], 4090, 14.0)]
    with pytest.raises(CommandError, match=r"1 of 4 .* context of 4096 tokens; the longest has 4190") as refused:
        plan(requests, WORDS, lengths=Lengths(), pace=Pace())
    scale = float(refused.value.advice.split()[1])
    assert plan(requests, WORDS, lengths=Lengths(scale=scale), pace=Pace()).left_out == 0
    assert plan(requests, WORDS, lengths=Lengths(leave_out_long=True), pace=Pace()).left_out == 1
    with pytest.raises(CommandError, match="none of the 1 requests"):
        plan(requests[3:], WORDS, lengths=Lengths(leave_out_long=True), pace=Pace())


def test_blocks_that_get_too_short_to_differ_are_refused() -> None:
    requests = [request([number], 512) for number in range(100)]
    with pytest.raises(CommandError, match="1 tokens a block can't tell 100 blocks apart: 2 are needed"):
        plan(requests, WORDS, lengths=Lengths(scale=0.002), pace=Pace())
    with pytest.raises(CommandError, match="no request"):
        plan([], WORDS, lengths=Lengths(), pace=Pace())


def test_users_take_whole_sessions_or_single_requests() -> None:
    named = [request([1], 600, 0, session="a"), request([2], 600, 1, session="b"), request([1], 600, 2, session="a")]
    work = plan([*named, CHAT[0], CHAT[1]], WORDS, lengths=Lengths(), pace=Pace())
    assert [[each.number for each in some] for some in sessions(work.requests)] == [[0, 2], [1], [3], [4]]
