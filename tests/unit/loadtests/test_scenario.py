"""Scenarios are read whole or refused with the key that is wrong; their shapes and thresholds do what they say."""

import math
from pathlib import Path

import pytest

from loadtests.scenario import Agent, Batch, Chat, Load, Rag, ScenarioError, Thresholds, names, read_scenario
from loadtests.shape import spawned_per_s, users_at
from loadtests.verdict import Figures, broken


def test_every_scenario_that_comes_along_can_be_read() -> None:
    assert {"chat", "agent", "rag", "batch", "smoke", "bursts", "diurnal", "shared-system-prompt"} <= set(names())
    for name in names():
        scenario = read_scenario(name)
        assert scenario.description
        assert scenario.thresholds.requests_min
        assert scenario.load.duration_s > scenario.load.ramp_s


@pytest.mark.parametrize(("name", "context"), [("long-32k", 32), ("long-64k", 64), ("long-128k", 128)])
def test_long_contexts_fill_what_they_are_named_after_and_fit_it(name: str, context: int) -> None:
    scenario = read_scenario(name)
    (chat,) = scenario.kinds.values()
    assert isinstance(chat, Chat)
    most = (
        chat.system_tokens + chat.first_tokens + chat.turns * chat.answer_tokens + (chat.turns - 1) * chat.turn_tokens
    )
    assert 0.95 * context * 1024 < most < context * 1024


def test_the_smoke_fits_the_tiny_model() -> None:
    assert read_scenario("smoke").least_tokens < 1000


def test_lengths_can_be_scaled_and_nothing_else_is() -> None:
    scenario = read_scenario("mixed").scaled(0.001)
    chat, rag = scenario.kinds["chat"], scenario.kinds["rag"]
    assert isinstance(chat, Chat)
    assert isinstance(rag, Rag)
    assert (chat.system_tokens, chat.turns, rag.documents, rag.document_tokens) == (1, 8, 500, 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "nobody has a share"),
        ("[chat]\nshare = 0", "nobody has a share"),
        ("[chats]\nshare = 1", "there is no 'chats'; allowed are agent, batch, chat"),
        ("[chat]\nshare = 1\nturn = 3", r"\[chat\] has no 'turn'; it has share, system_tokens"),
        ("[chat]\nshare = 1.5", r"\[chat\] share = 1.5; a whole number is allowed"),
        ("[chat]\nshare = true", "share = True; a whole number"),
        ("[chat]\nshare = 1\nturns = 0", "turns = 0; 1 or more"),
        ("[chat]\nshare = 1\nthink_s = -1", "think_s = -1; 0 or more"),
        ("[chat]\nshare = 1\nthink_s = nan", "think_s = nan; 0 or more"),
        ('[chat]\nshare = 1\n[load]\nshape = "wild"', "shape = 'wild'; allowed are steady, bursts, diurnal"),
        ('[chat]\nshare = 1\n[load]\nshape = "bursts"\nusers = 9', r"peak = 0; 9 \(users\) or more"),
        ('[chat]\nshare = 1\n[load]\nshape = "diurnal"\npeak = 9\nperiod_s = 0', "period_s = 0; more than 0"),
        ("[chat]\nshare = 1\n[thresholds]\nttft = 3", r"\[thresholds\] has no 'ttft'; it has requests_min"),
        ("chat = 3", r"chat is a table: \[chat\]"),
        ("[chat", "Expected"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(ScenarioError, match=why):
        read_scenario(str(file))


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(ScenarioError, match=r"unknown scenario 'chatt'; known: agent, batch, .*smoke"):
        read_scenario("chatt")


def test_a_steady_load_ramps_up_and_ends() -> None:
    load = Load(users=10, ramp_s=10, duration_s=60)
    assert [users_at(load, at_s) for at_s in (0, 5, 9.99, 10, 59.9, 60)] == [1, 5, 10, 10, 10, None]
    assert spawned_per_s(load) == 1


def test_bursts_come_at_the_end_of_each_period() -> None:
    load = Load(shape="bursts", users=2, peak=20, period_s=30, burst_s=5, ramp_s=0, duration_s=100)
    assert [users_at(load, at_s) for at_s in (0, 24.9, 25, 29.9, 30, 55)] == [2, 2, 20, 20, 2, 20]
    assert spawned_per_s(load) >= 18


def test_a_day_goes_up_and_down_between_its_ends() -> None:
    load = Load(shape="diurnal", users=4, peak=40, period_s=100, ramp_s=0, duration_s=1000)
    counts = [users_at(load, at_s) or 0 for at_s in range(101)]
    assert (counts[0], counts[50], counts[100]) == (4, 40, 4)
    assert counts[:51] == sorted(counts[:51])
    assert counts[50:] == sorted(counts[50:], reverse=True)
    assert counts[25] == 22
    assert math.isclose(sum(counts) / len(counts), 22, abs_tol=0.5)


SEEN = Figures(
    requests=100,
    failed_ratio=0.01,
    shed_ratio=0.0,
    ttft_p50_ms=200.0,
    ttft_p95_ms=900.0,
    itl_p95_ms=None,
    e2e_p95_ms=3000.0,
    cached_ratio=0.5,
)


def test_thresholds_that_hold_say_nothing() -> None:
    limits = Thresholds(requests_min=100, failed_ratio_max=0.01, ttft_p95_ms_max=900, cached_ratio_min=0.5)
    assert not list(broken(limits, SEEN))


def test_each_broken_threshold_is_named_with_what_was_seen() -> None:
    limits = Thresholds(requests_min=101, ttft_p50_ms_max=199, itl_p95_ms_max=50, cached_ratio_min=0.6)
    assert list(broken(limits, SEEN)) == [
        "requests is 100; min 101",
        "failed_ratio is 0.01; max 0",
        "ttft_p50_ms is 200; max 199",
        "itl_p95_ms: not known; max 50",
        "cached_ratio is 0.5; min 0.6",
    ]


def test_a_run_without_a_request_never_passes() -> None:
    nothing = Figures(
        requests=0,
        failed_ratio=0,
        shed_ratio=0,
        ttft_p50_ms=None,
        ttft_p95_ms=None,
        itl_p95_ms=None,
        e2e_p95_ms=None,
        cached_ratio=None,
    )
    assert list(broken(Thresholds(failed_ratio_max=None, shed_ratio_max=None), nothing)) == ["requests: there was none"]


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        (Chat(system_tokens=10, first_tokens=20, answer_tokens=5), 35),
        (Agent(system_tokens=10, task_tokens=20, answer_tokens=5), 35),
        (Rag(system_tokens=10, chosen=2, document_tokens=20, question_tokens=3, answer_tokens=5), 58),
        (Batch(system_tokens=10, prompt_tokens=20, answer_tokens=5), 35),
    ],
)
def test_a_kind_knows_what_context_it_needs(kind: Chat | Agent | Rag | Batch, tokens: int) -> None:
    assert kind.least_tokens == tokens
