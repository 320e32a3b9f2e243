"""The picture of ``kvgate top``."""

from typing import Any

import pytest

from kvgate.failure import CommandError
from kvgate.top.feed import Known
from kvgate.top.frame import ASCII, UNICODE, Screen, curve, frame

HBM = {"capacity_blocks": 100, "used_blocks": 61, "cached_blocks": 40, "block_bytes": 4096}


def instance(number: int, **more: Any) -> dict[str, Any]:
    answer = {"id": f"engine-{number}", "state": "healthy", "reason": "", "draining": False, "role": "hybrid"}
    answer |= {"breaker": "closed", "breaker_reason": "", "in_flight": 2, "running": 1, "waiting": 0}
    return answer | {"tiers": {"HBM": HBM}} | more


def tenant(name: str, **more: Any) -> dict[str, Any]:
    answer = {"tenant": name, "suspended": False, "requests_per_min": 100, "tokens_per_min": None, "concurrency": 8}
    return answer | {"slo": "standard", "usage": {"requests": 99, "tokens": 5, "running": 8}, "problem": None} | more


def interval(number: int, **more: Any) -> dict[str, Any]:
    answer = {"number": number, "span_s": 2.0, "outcomes": {"ok": 4}, "ttft_p50_s": 0.12, "ttft_p99_s": 1.5}
    answer |= {"known_tokens": 100, "cached_tokens": 60, "expected_tokens": 50, "in_flight": number % 7}
    return answer | more


def known(instances: int = 2, tenants: int = 1, intervals: int = 300, **more: Any) -> Known:
    status = {
        "usable": instances,
        "policy": "cost_aware",
        "worker": None,
        "open": False,
        "waiting": 3,
        "instances": [instance(number) for number in range(instances)],
        "tenants": [tenant(f"tenant-{number}") for number in range(tenants)],
    }
    candidates = [{"policy": "adaptive", "hit_ratio": 0.59}, {"policy": "lru", "hit_ratio": None}]
    answer: dict[str, Any] = {
        "status": status,
        "shadows": {"instances": {"engine-0": {"in_charge": "lru"}}, "candidates": candidates},
        "shadows_problem": None,
        "intervals": tuple(interval(number) for number in range(intervals)),
        "at_s": 10.0,
    }
    return Known(**answer | more)


def lines(what: Known, *, width: int = 80, height: int | None = 24, ascii_only: bool = False) -> list[str]:
    screen = Screen(width=width, height=height, glyphs=ASCII if ascii_only else UNICODE)
    return frame(what, screen, name="127.0.0.1:8000", now_s=11.0, footer="q quits").plain.split("\n")


def test_all_of_it_is_on_80_by_24() -> None:
    answer = lines(known())
    assert len(answer) <= 24
    assert max(map(len, answer)) <= 80
    text = "\n".join(answer)
    for word in ("2 of 2 usable", "cost_aware", "2.0/s", "120 ms", "p99 1.5 s", "60 %", "expected 50 %", "waiting 3"):
        assert word in text
    assert "engine-1       healthy   hybrid     2    1    0 ███░░ 61%" in text
    assert "tenant-0         99 of 100        -                    8 of 8      standard" in text
    assert "adaptive 59 %, lru -" in text
    assert answer[-1] == "q quits"


@pytest.mark.parametrize("width", [1, 20, 40, 80, 200])
@pytest.mark.parametrize("height", [1, 5, 12, 24, 60])
def test_it_fits_every_window_and_says_what_was_left_out(width: int, height: int) -> None:
    answer = lines(known(instances=40, tenants=30), width=width, height=height)
    assert len(answer) <= height
    assert max(map(len, answer)) <= width
    if width >= 80 and height >= 24:
        assert any("more lines of instances" in each for each in answer)
        assert any("more lines of tenants" in each for each in answer)
        assert answer[-1] == "q quits"


def test_a_terminal_of_plain_ascii_gets_plain_ascii() -> None:
    assert "\n".join(lines(known(), ascii_only=True)).isascii()


def test_nothing_at_all_is_shown_as_nothing() -> None:
    empty = known(0, 0, 0, shadows=None, shadows_problem="no instance is usable")
    text = "\n".join(lines(empty))
    assert text.count("none") == 2
    assert "policies unknown: no instance is usable" in text


def test_why_an_instance_is_not_used_stands_below_it() -> None:
    what = known()
    what.status["instances"] = [
        instance(0, state="unhealthy", reason="connection refused"),
        instance(1, breaker="open", breaker_reason="5 failures"),
        instance(2, draining=True, running=None, waiting=None, tiers={}),
    ]
    answer = lines(what)
    at = next(place for place, each in enumerate(answer) if each.startswith("engine-0"))
    assert answer[at + 1] == "  connection refused"
    assert answer[at + 3] == "  breaker open: 5 failures"
    assert answer[at + 4].split()[:6] == ["engine-2", "draining", "hybrid", "2", "-", "-"]


def test_what_is_old_says_so_and_why() -> None:
    assert lines(known(problem=CommandError("no gateway answers")))[1] == "1 s old: no gateway answers"
    assert lines(known(at_s=1.0))[1] == "10 s old: the gateway has not answered yet"


def test_control_characters_of_an_instance_do_not_reach_the_terminal() -> None:
    what = known()
    what.status["instances"] = [instance(0, state="unhealthy", reason="a\x1b]0;title\x07b\x1b[2J")]
    assert "\x1b" not in "\n".join(lines(what))


def test_a_curve_has_a_place_for_each_value() -> None:
    assert curve([0.0, 0.5, 1.0, None], UNICODE, top=1.0) == "▁▅█ "
    assert curve([0.0, 0.0], UNICODE) == "▁▁"
    assert curve([], UNICODE) == ""
