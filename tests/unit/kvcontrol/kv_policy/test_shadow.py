"""Shadow policies find what the policies themselves would have found, and never take more time than they may."""

import random
from array import array
from collections.abc import Iterator
from typing import cast

import pytest

from kvcontrol.kv_policy import PolicyError, ShadowPolicies, make_policy
from kvcontrol.kv_policy.shadow import MOST_CANDIDATES, MOST_LOAD, SAMPLE_BLOCKS
from kvcontrol.kv_policy.spec import parse_specs
from lab.replay.policy import replay
from lab.traces import Request

CANDIDATES = "lru,s3fifo,arc,lru2,mq,adaptive"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def requests(seed: int, *, chats: int, turns: int, blocks: int) -> Iterator[list[int]]:
    """Chats that grow, each turn of a random one of those that go on."""
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    fresh = 0
    going: list[list[int]] = []
    for _ in range(chats * turns):
        if len(going) < chats or rng.random() < 1 / turns:
            going.append([])
            going = going[-chats:]
        chat = rng.choice(going)
        chat.extend(range(fresh, fresh + blocks))
        fresh += blocks
        yield list(chat)


def shadows(
    text: str = CANDIDATES, *, capacity: int, clock: Clock | None = None, window_s: float = 60.0
) -> ShadowPolicies:
    return ShadowPolicies(
        parse_specs(text), capacity_blocks=capacity, clock=clock or Clock(), timer=lambda: 0.0, window_s=window_s
    )


def test_without_sampling_each_finds_what_a_replay_of_the_policy_finds() -> None:
    prompts = list(requests(1, chats=30, turns=6, blocks=3))
    watched = shadows(capacity=100)
    for prompt in prompts:
        watched.requested(prompt)
        watched.settle()
    as_trace = [
        Request(block_ids=array("q", prompt), block_tokens=1, prompt_tokens=len(prompt), at_s=0.0) for prompt in prompts
    ]
    report = watched.report()
    assert report.sampled_ratio == 1
    for each in report.standings:
        expected = replay(as_trace, make_policy(each.policy, capacity_blocks=100), capacity_blocks=100)
        assert each.hits / each.lookups == pytest.approx(expected.prefix, abs=1e-9)


def test_a_sample_tells_the_same_as_all_within_a_few_percent() -> None:
    capacity = 8 * SAMPLE_BLOCKS
    prompts = list(requests(2, chats=900, turns=4, blocks=8))
    watched = shadows("lru,lru2", capacity=capacity)
    for prompt in prompts:
        watched.requested(prompt)
        watched.settle()
    as_trace = [
        Request(block_ids=array("q", prompt), block_tokens=1, prompt_tokens=len(prompt), at_s=0.0) for prompt in prompts
    ]
    report = watched.report()
    assert report.sampled_ratio == 1 / 8
    for each in report.standings:
        expected = replay(as_trace, make_policy(each.policy, capacity_blocks=capacity), capacity_blocks=capacity).prefix
        assert each.hits / each.lookups == pytest.approx(expected, abs=0.04)


def test_a_hit_after_the_first_miss_of_a_prompt_is_none() -> None:
    watched = shadows("lru", capacity=4)
    watched.requested([1, 2, 3])
    watched.stored([7, 8, 9])
    watched.requested([1, 2, 3])
    watched.settle()
    (standing,) = watched.report().standings
    assert standing.lookups == 6
    assert standing.hits == 1  # the head alone is left of the first prompt


def test_what_was_decoded_is_there_for_the_next_turn() -> None:
    watched = shadows("lru", capacity=16)
    watched.requested([1, 2])
    watched.stored([3])
    watched.requested([1, 2, 3])
    watched.settle()
    assert watched.report().standings[0].hits == 3


def test_windows_end_and_say_what_was_found_in_them() -> None:
    clock = Clock()
    watched = shadows("lru", capacity=16, clock=clock, window_s=10.0)
    watched.requested([1, 2])
    watched.settle()
    assert watched.report().standings[0].window_hit_ratio is None
    clock.now_s = 11.0
    watched.requested([1, 2])
    watched.settle()
    assert watched.report().standings[0].window_hit_ratio == 0
    clock.now_s = 22.0
    watched.requested([1, 2])
    watched.settle()
    assert watched.report().standings[0].window_hit_ratio == 1


def test_requests_are_skipped_rather_than_the_load_exceeded() -> None:
    clock = Clock()
    ticks = iter(range(1_000_000))
    watched = ShadowPolicies(
        parse_specs("lru"), capacity_blocks=16, clock=clock, timer=lambda: next(ticks) * 0.01
    )  # to choose its keys takes 10 ms, and so does to follow it
    for place in range(5_000):
        clock.now_s = place * 0.01
        watched.requested([place])
        watched.settle()
    report = watched.report()
    assert report.requests + report.skipped_requests == 5_000
    assert report.busy_s <= MOST_LOAD * clock.now_s + 0.07
    assert report.requests > 20


def test_a_request_is_only_noted_and_followed_a_candidate_at_a_time() -> None:
    watched = shadows("lru,arc", capacity=16)
    watched.requested([1, 2])
    assert [each.lookups for each in watched.report().standings] == [0, 0]
    assert watched.work()
    assert [each.lookups for each in watched.report().standings] == [2, 0]
    assert not watched.work()
    assert [each.lookups for each in watched.report().standings] == [2, 2]
    assert not watched.work()


def test_what_nobody_has_time_to_follow_is_skipped_rather_than_kept() -> None:
    watched = shadows("lru", capacity=16)
    for place in range(5_000):
        watched.requested([place])
    watched.settle()
    report = watched.report()
    assert report.standings[0].lookups == report.requests < 5_000
    assert report.requests + report.skipped_requests == 5_000


def test_no_candidates_cost_nothing_and_too_many_are_refused() -> None:
    nobody = ShadowPolicies((), capacity_blocks=1)
    nobody.requested([1])
    assert nobody.report().standings == ()
    many = ",".join(f"mq(lifetime={number + 1})" for number in range(MOST_CANDIDATES + 1))
    with pytest.raises(PolicyError, match="at most"):
        shadows(many, capacity=16)
    with pytest.raises(PolicyError, match="unknown policy"):
        shadows("best", capacity=16)
    with pytest.raises(PolicyError, match="capacity of 0"):
        shadows("lru", capacity=0)
    with pytest.raises(PolicyError, match="window_s is nan; it must be > 0 and finite"):
        ShadowPolicies((), capacity_blocks=1, window_s=float("nan"))


def test_a_request_whose_keys_cannot_be_followed_is_refused_at_once_and_not_noted() -> None:
    watched = shadows("lru", capacity=16)
    for call in (watched.requested, watched.stored):
        with pytest.raises(PolicyError, match=r"keys\[1\] is \[2\]; allowed are hashable values"):
            call([1, cast("int", [2])])
    watched.settle()
    assert watched.report().requests == 0
