"""What a step is, of a snapshot: prompts or tokens, and how many prompt tokens."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcontrol.kv_policy.allowed import PolicyError
from kvcontrol.scheduler_ir.pacing import (
    MOST_OWED,
    ActiveChunk,
    ChunkBounds,
    Pace,
    Reason,
    StepCosts,
    StepView,
    decide,
    limits,
    make_pace,
    owed,
)
from tests.support.examples import examples

BOUNDS = ChunkBounds(block_tokens=16, most_tokens=8192)
TARGET = Pace(target_s=0.060, prefill_share=0.25)
ALTERNATE = Pace()


def costs(*, per_token_s: float = 25e-6, fixed_s: float = 0.005, decode_s: float = 0.010) -> StepCosts:
    """Return what has seen an engine whose steps take that long."""
    seen = StepCosts()
    for tokens in (1, 64, 512, 2048, 8192) * 20:
        seen.saw_prefill(tokens, tokens * tokens / 2, 0, fixed_s + per_token_s * tokens)
        seen.saw_decode(4, 1000, decode_s)
    return seen


def view(**changed: object) -> StepView:
    return StepView(**({"answering": 4} | changed))  # type: ignore[arg-type]


def test_nothing_but_tokens_is_computed_while_no_prompt_is_due() -> None:
    assert decide(view(), TARGET, costs(), BOUNDS).reason is Reason.NO_PROMPT
    assert not decide(view(), TARGET, costs(), BOUNDS).is_prefill


def test_a_prompt_runs_at_full_speed_where_nobody_answers_whatever_is_owed() -> None:
    chunk = ActiveChunk(left_tokens=100_000, history_tokens=0)
    command = decide(view(answering=0, chunk=chunk, debt=9), TARGET, costs(), BOUNDS)
    assert (command.is_prefill, command.reason) == (True, Reason.NOBODY_ANSWERS)
    assert (command.prompt_tokens, command.chunk_tokens) == (8192, 8192)


@pytest.mark.parametrize("chunk", [None, ActiveChunk(left_tokens=10, history_tokens=100)])
@pytest.mark.parametrize("pace", [TARGET, ALTERNATE])
def test_what_is_owed_goes_before_prompts_and_chunks_the_last_one_too(pace: Pace, chunk: ActiveChunk | None) -> None:
    command = decide(view(is_prompt_due=True, chunk=chunk, debt=1), pace, costs(), BOUNDS)
    assert (command.is_prefill, command.reason) == (False, Reason.OWED)


def test_a_chunk_beside_answers_is_the_longest_that_leaves_time_for_a_token_within_the_target() -> None:
    command = decide(view(is_prompt_due=True), TARGET, costs(), BOUNDS)
    assert command.prompt_tokens == 1792  # 5 ms and 1,792 * 25 us within 60 ms less a decode step; 1,808 are over
    assert owed(TARGET, 0.0498, 0.010) == 1


def test_chunks_are_equal_where_the_last_would_be_a_rest() -> None:
    chunk = ActiveChunk(left_tokens=1_900, history_tokens=0)
    assert decide(view(chunk=chunk), TARGET, costs(), BOUNDS).chunk_tokens == 960
    rest = ActiveChunk(left_tokens=1_700, history_tokens=0)
    assert decide(view(chunk=rest), TARGET, costs(), BOUNDS).chunk_tokens == 1792


def test_without_a_target_chunks_are_the_engines_and_one_step_is_owed() -> None:
    chunk = ActiveChunk(left_tokens=100_000, history_tokens=0)
    assert decide(view(chunk=chunk), ALTERNATE, costs(), BOUNDS).chunk_tokens == 8192
    assert owed(ALTERNATE, 10.0, 0.010) == 1


def test_what_was_not_measured_yet_is_not_guessed() -> None:
    command = decide(view(is_prompt_due=True), TARGET, StepCosts(), BOUNDS)
    assert (command.is_prefill, command.prompt_tokens) == (True, 8192)
    assert owed(TARGET, None, 0.010) == owed(TARGET, 0.2, None) == 1


def test_chunks_grow_step_by_step_beyond_what_was_measured() -> None:
    seen = StepCosts()
    seen.saw_prefill(64, 2048, 0, 0.040)
    seen.saw_decode(4, 1000, 0.010)
    assert limits(TARGET, seen, BOUNDS, 0.010, 0).tokens == 256


def test_a_long_prefill_owes_what_keeps_the_mean_within_the_target() -> None:
    assert owed(TARGET, 0.200, 0.010) == 4
    assert owed(TARGET, 10.0, 0.010) == MOST_OWED


def test_a_target_below_a_decode_step_leaves_prompts_their_share_and_says_so() -> None:
    slow = costs(decode_s=0.080)
    found = limits(TARGET, slow, BOUNDS, 0.080, 0)
    assert found.budget_s == pytest.approx(0.080 / 3)
    assert "a decode step takes 80.0 ms: prompts have 25% of the time, in chunks of" in found.unmet
    assert limits(TARGET, costs(), BOUNDS, 0.010, 0).unmet == ""


def test_a_chunk_is_not_cut_until_most_of_it_is_fixed_cost_and_says_so() -> None:
    slow = costs(fixed_s=0.060)
    found = limits(TARGET, slow, BOUNDS, 0.010, 0)
    taken_s = slow.chunk_s(found.tokens, 0)
    assert taken_s == pytest.approx(0.120, rel=0.02)
    assert f"a chunk of {found.tokens} tokens" in found.unmet
    assert "3 decode steps follow each chunk" in found.unmet


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("best", {}, "unknown pace 'best'; known: lmdeploy, alternate, itl_target"),
        ("itl_target", {"itl_target_ms": 0.5}, "itl_target_ms is 0.5; allowed is a number from 1 to 60000"),
        ("itl_target", {"prefill_share": 0}, "prefill_share is 0; allowed is"),
        ("alternate", {"itl_target_ms": 50}, "has no parameter 'itl_target_ms'"),
    ],
)
def test_a_pace_that_cannot_be_is_refused_with_what_is_allowed(name: str, values: dict[str, float], why: str) -> None:
    with pytest.raises(PolicyError) as refused:
        make_pace(name, values)
    assert why in str(refused.value)


def test_lmdeploys_own_rule_is_no_pace_of_ours() -> None:
    assert make_pace("lmdeploy") is None
    assert make_pace("itl_target", {"itl_target_ms": 40}) == Pace(
        target_s=0.04, prefill_share=0.25, overtaken_share=1.0, overlapped_tokens=2048, reserved_share=0.18
    )
    assert make_pace("alternate") == Pace(overtaken_share=1.0)


class Machine:
    """An engine in virtual time: one long prompt at a time in chunks, every step as long as its true cost says."""

    def __init__(self, pace: Pace, prompts: list[int], *, prefill: tuple[float, float, float], decode_s: float) -> None:
        self.pace, self.waiting, self.costs = pace, list(prompts), StepCosts()
        self.prefill, self.decode = prefill, decode_s
        self.chunk: ActiveChunk | None = None
        self.debt = 0
        self.answers = [10**9]  # one that never ends, in tokens left
        self.prompt_tokens = BOUNDS.most_tokens
        self.steps: list[tuple[bool, float, str, int]] = []
        for tokens in (16, 256, 1024, 8192) * 8:
            self.learn(tokens, 0)
        self.costs.saw_decode(1, 0, decode_s)

    def cost_s(self, tokens: int, history: int) -> float:
        fixed, per_token, per_pair = self.prefill
        return fixed + per_token * tokens + per_pair * tokens * (history + tokens / 2)

    def learn(self, tokens: int, history: int) -> float:
        took_s = self.cost_s(tokens, history)
        self.costs.saw_prefill(tokens, tokens * (history + tokens / 2), history, took_s)
        return took_s

    def step(self) -> None:
        look = StepView(answering=len(self.answers), is_prompt_due=bool(self.waiting), chunk=self.chunk, debt=self.debt)
        command = decide(look, self.pace, self.costs, BOUNDS)
        if not command.is_prefill:
            self.debt = max(0, self.debt - 1)
            self.costs.saw_decode(len(self.answers), 0, self.decode)
            self.answers = [left - 1 for left in self.answers if left > 1]
            self.steps.append((False, self.decode, command.reason, 0))
            return
        assert command.prompt_tokens is not None
        if self.chunk is None:
            self.chunk = ActiveChunk(left_tokens=self.waiting.pop(0), history_tokens=0)
            size = command.prompt_tokens
        else:
            assert command.chunk_tokens is not None
            size = command.chunk_tokens
        tokens = min(size, self.chunk.left_tokens)
        assert tokens == self.chunk.left_tokens or size == BOUNDS.most_tokens or size % BOUNDS.block_tokens == 0
        expected_s = self.costs.chunk_s(tokens, self.chunk.history_tokens)
        decode_s = self.costs.decode_s(len(self.answers), 0)
        charged = owed(self.pace, expected_s, decode_s)
        took_s = self.learn(tokens, self.chunk.history_tokens)
        self.debt = charged + max(0, owed(self.pace, took_s, decode_s) - charged)
        self.steps.append((True, took_s, command.reason, self.debt))
        left, history = self.chunk.left_tokens - tokens, self.chunk.history_tokens + tokens
        self.chunk = ActiveChunk(left_tokens=left, history_tokens=history) if left else None
        if not left:
            self.answers.append(20)


@settings(max_examples=examples(200), deadline=None)
@given(
    prompts=st.lists(st.integers(1, 60_000), min_size=1, max_size=6),
    target_ms=st.sampled_from([0, 5, 20, 60, 250]),
    share=st.floats(0.05, 0.9),
    prefill=st.tuples(st.floats(1e-4, 0.06), st.floats(1e-6, 1e-4), st.floats(0, 2e-9)),
    decode_s=st.floats(0.001, 0.1),
)
def test_nobody_starves_debts_are_paid_and_the_target_is_kept_where_it_can_be(
    prompts: list[int], target_ms: int, share: float, prefill: tuple[float, float, float], decode_s: float
) -> None:
    pace = Pace(target_s=target_ms / 1e3, prefill_share=share)
    machine = Machine(pace, prompts, prefill=prefill, decode_s=decode_s)
    while machine.waiting or machine.chunk is not None:
        machine.step()
        assert len(machine.steps) < 80_000  # every prompt is computed
    while machine.debt:
        machine.step()
    since = MOST_OWED
    owing = 0
    for is_prefill, took_s, _reason, debt in machine.steps:
        if is_prefill:
            assert since >= owing  # what was owed was paid
            assert since <= MOST_OWED  # and no more: prompts wait for nothing else
            since, owing = 0, debt
            found = limits(pace, machine.costs, BOUNDS, decode_s, 0)
            if target_ms and not found.unmet and not prefill[2]:
                assert took_s + decode_s <= pace.target_s * 1.1
        else:
            since += 1


@given(st.floats(0.001, 1), st.floats(0.001, 0.2), st.floats(0.05, 0.9), st.floats(0.001, 1))
def test_prompts_have_their_share_of_the_time_whatever_the_target(
    target_s: float, decode_s: float, share: float, prefill_s: float
) -> None:
    steps = owed(Pace(target_s=target_s, prefill_share=share), prefill_s, decode_s)
    least = max(1, ceil(prefill_s * (1 - share) / share / decode_s - 1e-9))
    assert 1 <= steps <= min(MOST_OWED, least)


OVERLAPPING = Pace(target_s=0.060, prefill_share=0.25, overlapped_tokens=2048)


def test_no_prompt_is_computed_while_a_chunk_overlaps_with_decode_steps() -> None:
    chunk = ActiveChunk(left_tokens=10_000, history_tokens=0)
    for due in ({"chunk": chunk}, {"is_prompt_due": True}):
        command = decide(view(can_overlap=True, is_overlapping=True, **due), OVERLAPPING, costs(), BOUNDS)
        assert (command.is_prefill, command.reason) == (False, Reason.OVERLAP)


def test_a_chunk_that_overlaps_may_be_longer_than_the_target_and_leaves_a_short_last_one() -> None:
    def chunk_tokens(left: int) -> int | None:
        chunk = ActiveChunk(left_tokens=left, history_tokens=0)
        command = decide(view(can_overlap=True, chunk=chunk), OVERLAPPING, costs(), BOUNDS)
        assert (command.is_prefill, command.overlaps) == (True, True)
        return command.chunk_tokens

    assert chunk_tokens(50_000) == 2048
    assert chunk_tokens(2_200) == 1_936  # 256 are left, and whole blocks
    assert chunk_tokens(1_792) == 1_792  # it takes no longer than the target allows: the last chunk


@pytest.mark.parametrize(
    ("pace", "found"),
    [(OVERLAPPING, view()), (TARGET, view(can_overlap=True))],
    ids=["no second stream", "switched off"],
)
def test_chunks_are_those_of_the_target_where_none_overlaps(pace: Pace, found: StepView) -> None:
    chunk = ActiveChunk(left_tokens=50_000, history_tokens=0)
    command = decide(replace(found, chunk=chunk), pace, costs(), BOUNDS)
    assert (command.overlaps, command.chunk_tokens) == (False, 1792)


def test_a_prompt_that_nobody_waits_for_does_not_wait_for_a_chunk_that_overlapped() -> None:
    chunk = ActiveChunk(left_tokens=50_000, history_tokens=0)
    command = decide(
        view(answering=0, can_overlap=True, is_overlapping=True, chunk=chunk), OVERLAPPING, costs(), BOUNDS
    )
    assert (command.is_prefill, command.overlaps, command.chunk_tokens) == (True, False, 8192)


@given(
    left=st.integers(1, 200_000),
    history=st.integers(0, 100_000),
    most=st.integers(16, 65_536),
    per_token_s=st.floats(1e-6, 1e-3),
)
@settings(max_examples=examples(200))
def test_any_prompt_is_computed_to_its_end_in_chunks_that_overlap(
    left: int, history: int, most: int, per_token_s: float
) -> None:
    pace, known = Pace(target_s=0.060, overlapped_tokens=most), costs(per_token_s=per_token_s)
    for _ in range(100_000):
        chunk = ActiveChunk(left_tokens=left, history_tokens=history)
        command = decide(view(can_overlap=True, chunk=chunk), pace, known, BOUNDS)
        assert command.chunk_tokens is not None
        assert command.chunk_tokens > 0
        if command.chunk_tokens >= left:
            return
        left, history = left - command.chunk_tokens, history + command.chunk_tokens
    raise AssertionError("never computed to its end")
