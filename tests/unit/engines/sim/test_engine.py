"""Continuous batching over blocks: what each request gets, when, and that nothing is lost."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.sim.behaviour import Behaviour
from engines.sim.gaps import GapHistogram
from engines.sim.room import DoesNotFitError
from engines.sim.sequence import Phase, SimRequest, SimSequence
from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_policy import AdaptivePolicy, PolicyError
from tests.support.examples import examples
from tests.support.simulated import BLOCK, TIME, Listening, Mirror, engine, finish, request, run, small_profile

ARRIVALS = st.lists(
    st.tuples(
        st.floats(0, 2),
        st.lists(st.integers(0, 2), min_size=0, max_size=10),
        st.integers(1, 3),
        st.integers(1, 40),
    ),
    max_size=20,
)


def requests(arrivals: Sequence[tuple[float, list[int], int, int]]) -> list[tuple[float, SimRequest]]:
    ordered = sorted(arrivals, key=lambda each: each[0])
    return [
        (at_s, request(str(number), contents, more=more, output=output))
        for number, (at_s, contents, more, output) in enumerate(ordered)
    ]


def times(sequences: Sequence[SimSequence]) -> list[tuple[float, float, int]]:
    return [(each.first_token_s or 0.0, each.ended_s or 0.0, each.cached_tokens) for each in sequences]


def test_a_lone_request_takes_what_the_model_says() -> None:
    heard = Listening()
    (only,) = run(engine(heard), [(1.0, request("a", range(20), output=5))])
    prompt_s = TIME.prompt_s(81, 0, 32)
    assert only.first_token_s == pytest.approx(1.0 + prompt_s)
    assert only.ended_s == pytest.approx(1.0 + prompt_s + TIME.span_s(4, 1, 81))
    assert only.cached_tokens == 0
    assert only.generated == 5


def test_a_request_waits_for_its_front_and_that_of_those_before_it() -> None:
    profile = replace(small_profile(), time=FRONT)
    first, second = run(
        engine(Listening(), profile=profile), [(1.0, request(name, [n] * 5)) for n, name in ((1, "a"), (2, "b"))]
    )
    front_s = 0.01 + 21 * 0.001
    assert first.first_token_s == pytest.approx(1.0 + front_s + TIME.prompt_s(21, 0, 32))
    begins_s = max(1.0 + 2 * front_s, first.first_token_s or 0.0)
    assert begins_s < (second.first_token_s or 0.0) <= begins_s + TIME.prompt_s(21, 0, 32) + 2 * TIME.span_s(1, 1, 60)
    assert engine(Listening(), profile=profile).waiting == 0


def beside_a_long_prompt(pace: str, **time: float) -> tuple[float, float, float]:
    """Return the longest pause of an answer beside a prompt of eight chunks, that prompt's TTFT and the mean pause."""
    heard = Listening()
    profile = replace(small_profile(hbm_blocks=256, pace=pace), time=replace(TIME, **time))
    busy = engine(heard, profile=profile, stream=True)
    busy.submit(request("answer", [], more=4, output=200), 0.0)
    busy.advance(1.0)
    long = busy.submit(request("long", range(100, 164)), 1.0)
    finish(busy)
    seen = [after - before for before, after in pairwise(heard.moments["answer"])]
    return max(seen), (long.first_token_s or 0.0) - 1.0, sum(seen) / len(seen)


def test_paces_trade_pauses_of_answers_for_the_first_tokens_of_prompts() -> None:
    lmdeploy = beside_a_long_prompt("lmdeploy")
    alternate = beside_a_long_prompt("alternate")
    target = beside_a_long_prompt("itl_target(itl_target_ms=150,overlapped_tokens=0)")
    overlap = beside_a_long_prompt("itl_target(itl_target_ms=150,overlapped_tokens=32)", overlap_decode=1.5)
    assert lmdeploy[0] > alternate[0] > target[0], "its last chunk follows the one before it at once"
    assert lmdeploy[1] < alternate[1] < target[1]
    assert overlap[2] < target[2]
    assert overlap[0] < alternate[0]


def test_a_pace_that_there_is_not_is_refused() -> None:
    for name, why in (("magic", "unknown pace"), ("alternate(speed=2)", "speed"), ("", "is not written like")):
        with pytest.raises(PolicyError, match=why):
            small_profile(pace=name)


def test_a_prompt_with_much_less_left_overtakes_a_long_one() -> None:
    def served(pace: str) -> tuple[float, float]:
        profile = small_profile(hbm_blocks=512, pace=pace)
        busy = engine(Listening(), profile=profile)
        long = busy.submit(request("long", range(200)), 0.0)
        busy.advance(0.1)
        other = busy.submit(request("other", range(300, 330)), 0.1)
        finish(busy)
        return long.first_token_s or 0.0, other.first_token_s or 0.0

    long_s, other_s = served("alternate")
    assert other_s < long_s
    long_s, other_s = served("alternate(overtaken_share=0)")
    assert other_s > long_s


def test_a_revisit_computes_only_what_is_new_and_always_the_last_token() -> None:
    revisited = engine(Listening())
    first, second = run(revisited, [(0.0, request("a", range(10), more=0)), (9.0, request("b", range(10), more=0))])
    assert first.cached_tokens == 0
    assert second.cached_tokens == 9 * BLOCK
    assert second.first_token_s == pytest.approx(9.0 + TIME.prompt_s(BLOCK, 9 * BLOCK, 32))
    assert revisited.counters.hit_tokens == 9 * BLOCK


def test_an_answers_blocks_are_found_by_the_next_turn() -> None:
    conversation = engine(Listening())
    run(conversation, [(0.0, request("a", [1, 2], more=1, output=12, answer=[3, 4, 5]))])
    (turn,) = run(conversation, [(9.0, request("b", [1, 2, 3, 4, 5, 6]))])
    # 9 tokens of prompt and 12 of answer fill five blocks; the fifth was filled after the last time it needed room
    assert turn.cached_tokens == 4 * BLOCK


def test_short_prompts_are_computed_together_and_between_the_chunks_of_long_ones_while_answers_go_on() -> None:
    busy = engine(Listening(), hbm_blocks=256, max_batch=16)
    answering = busy.submit(request("a", [], more=4, output=200), 0.0)
    busy.advance(1.0)
    long = busy.submit(request("long", range(100, 124)), 1.0)
    busy.advance(busy.next_event_s)
    shorts = [busy.submit(request(f"s{each}", range(200 + 9 * each, 206 + 9 * each)), 1.1) for each in range(8)]
    tiny = busy.submit(request("tiny", [300]), 1.1)
    finish(busy)
    # 97 tokens in steps of 32: two of them, each with three steps of shorts behind it (25 tokens, and once 5), then the
    # third and at once what is left
    order = sorted([*shorts, long], key=lambda each: each.first_token_s or math.inf)
    assert order == [*shorts[:6], long, *shorts[6:]]
    assert tiny.first_token_s == shorts[0].first_token_s
    assert answering.ended_s is not None
    assert busy.gaps.total == 199
    # one step of decoding after each of the prefill steps that it met
    assert busy.gaps.quantile_s(1.0) > TIME.step_s


PACES = ["at_once", "lmdeploy", "alternate", "itl_target", "itl_target(overlapped_tokens=0)"]
FRONT = replace(TIME, front_s=0.01, front_token_s=0.001, overlap_chunk=1.2, overlap_decode=1.5)


@pytest.mark.parametrize("pace", PACES)
@given(ARRIVALS)
@settings(max_examples=examples(40), deadline=None)
def test_spans_end_where_single_steps_do(pace: str, arrivals: list[tuple[float, list[int], int, int]]) -> None:
    heard, stepped = Listening(), Listening()
    profile = replace(small_profile(hbm_blocks=24, pace=pace), time=FRONT)
    spans = run(engine(heard, profile=profile), requests(arrivals))
    steps = run(engine(stepped, profile=profile, stream=True), requests(arrivals))
    for one, other in zip(times(spans), times(steps), strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    assert stepped.tokens == {each.request.request_id: each.request.output_tokens for each in steps}


@pytest.mark.parametrize("pace", PACES)
@given(ARRIVALS, st.integers(21, 40), st.sampled_from([0, 30]), st.lists(st.floats(0, 4), max_size=5))
@settings(max_examples=examples(60), deadline=None)
def test_every_request_ends_and_gives_its_blocks_back(
    pace: str, arrivals: list[tuple[float, list[int], int, int]], blocks: int, ddr: int, cancels: list[float]
) -> None:
    heard, mirror = Listening(), Mirror()
    shape = small_profile(hbm_blocks=blocks, ddr_blocks=ddr, nvme_blocks=2 * ddr, pace=pace)
    tight = engine(heard, sink=mirror, profile=replace(shape, time=FRONT))
    events: list[tuple[float, SimRequest | None]] = [*requests(arrivals), *((at_s, None) for at_s in cancels)]
    sequences: list[SimSequence] = []
    for at_s, each in sorted(events, key=lambda event: event[0]):
        if each is not None:
            sequences.append(tight.submit(each, at_s))
        elif sequences:
            tight.cancel(sequences[int(at_s * 1000) % len(sequences)], at_s)
        tight.check_integrity()
    while not tight.idle:
        tight.advance(tight.next_event_s)
        tight.check_integrity()
    assert all(each.phase is Phase.ENDED for each in sequences)
    assert tight.counters.ended + tight.counters.cancelled == len(sequences)
    assert tight.pool.used_blocks == len(tight.pool.cached)
    assert tight.pool.available_blocks == blocks
    assert len(mirror.held.get(CacheTier.HBM, {})) == len(tight.pool.cached)
    assert {each.request.request_id for each in heard.over} == {
        each.request.request_id for each in sequences if each.ended_s is not None
    }
    tight.close()


def test_one_that_needs_a_block_when_there_is_none_makes_way_and_still_gets_all_of_its_answer() -> None:
    heard = Listening()
    tight = engine(heard, hbm_blocks=16, stream=True)
    run(tight, [(0.0, request(str(number), [], more=4, output=40)) for number in range(3)])
    assert tight.counters.preemptions > 0
    assert heard.tokens == dict.fromkeys("012", 40)
    assert heard.over[0].request.request_id == "0"


def pauses(heard: Listening) -> GapHistogram:
    """The pauses of answers as their clients see them."""
    seen = GapHistogram()
    for moments in heard.moments.values():
        for before, after in pairwise(moments):
            seen.add(after - before, 1)
    return seen


def test_the_pause_of_an_answer_that_made_way_counts() -> None:
    heard = Listening()
    tight = engine(heard, hbm_blocks=16, stream=True)
    run(tight, [(0.0, request(str(number), [], more=4, output=40)) for number in range(3)])
    assert tight.counters.preemptions > 0
    longest_s = max(after - before for moments in heard.moments.values() for before, after in pairwise(moments))
    assert longest_s > 0.5
    assert tight.gaps.quantile_s(1.0) == pytest.approx(longest_s, rel=0.06)
    assert tight.gaps.counts == pauses(heard).counts


@given(ARRIVALS, st.integers(16, 40), st.lists(st.floats(0, 4), max_size=5))
@settings(max_examples=examples(80), deadline=None)
def test_pauses_are_those_that_clients_see(
    arrivals: list[tuple[float, list[int], int, int]], blocks: int, cancels: list[float]
) -> None:
    heard = Listening()
    tight = engine(heard, hbm_blocks=blocks, stream=True)
    events: list[tuple[float, SimRequest | None]] = [*requests(arrivals), *((at_s, None) for at_s in cancels)]
    sequences: list[SimSequence] = []
    for at_s, each in sorted(events, key=lambda event: event[0]):
        if each is not None:
            if each.prompt_tokens + each.output_tokens <= blocks * BLOCK:
                sequences.append(tight.submit(each, at_s))
        elif sequences:
            tight.cancel(sequences[int(at_s * 1000) % len(sequences)], at_s)
    finish(tight)
    assert tight.gaps.counts == pauses(heard).counts


def test_what_waits_for_a_place_starts_when_there_is_one() -> None:
    full = engine(Listening())
    sequences = run(full, [(0.0, request(str(number), [number], output=10)) for number in range(9)])
    assert all(each.ended_s is not None for each in sequences)
    assert [each.first_token_s for each in sequences] == sorted(each.first_token_s or math.inf for each in sequences)


def test_the_same_seed_gives_the_same_times_and_another_one_others() -> None:
    def of(seed: int) -> list[tuple[float, float, int]]:
        noisy = engine(Listening(), behaviour=Behaviour(seed=seed, jitter=0.1))
        return times(run(noisy, [(0.1 * number, request(str(number), [number], output=9)) for number in range(6)]))

    assert of(1) == of(1)
    assert of(1) != of(2)


def test_a_slow_engine_takes_longer_by_its_factor() -> None:
    (quick,) = run(engine(Listening()), [(0.0, request("a", range(5), output=9))])
    (slow,) = run(engine(Listening(), behaviour=Behaviour(slow=3.0)), [(0.0, request("a", range(5), output=9))])
    assert slow.ended_s == pytest.approx(3 * (quick.ended_s or 0.0))


def test_a_request_that_could_never_be_served_is_refused() -> None:
    with pytest.raises(DoesNotFitError, match="at most 256 together"):
        engine(Listening()).submit(request("a", range(60), output=40), 0.0)
    with pytest.raises(DoesNotFitError, match="there must be 1 of each"):
        engine(Listening()).submit(request("a", [], output=0), 0.0)


@pytest.mark.parametrize("bad", [{"jitter": 2.0}, {"slow": 0.0}, {"corrupt_share": -1.0}])
def test_a_behaviour_that_can_not_be_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Behaviour(**bad)


def test_adaptives_guard_counts_what_lru_would_find() -> None:
    rng = Random(3)  # noqa: S311 - reproducible, not secret
    prompts = []
    for number in range(400):
        first = 10 * rng.randrange(8) if number % 2 else 1_000 + 10 * number  # popular, or never asked for again
        prompts.append((float(number), request(str(number), range(first, first + 6))))
    lru, adaptive = (engine(Listening(), policy=name) for name in ("lru", "adaptive"))
    for each in (lru, adaptive):
        run(each, prompts)
    policy = adaptive.pool.policy
    assert isinstance(policy, AdaptivePolicy)
    state = policy.state()
    assert (state.hits, state.lru_hits) == (adaptive.counters.hit_tokens, lru.counters.hit_tokens)
    assert state.hits > 1.2 * state.lru_hits
