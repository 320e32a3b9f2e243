"""Tables of the admin commands, where they go into a pipe."""

from datetime import datetime

import pytest

from kvgate.admin.output import Operator, show, table_of, text_of

LONG = "http://" + "a" * 300 + ".example:8000"


def test_a_row_is_one_line_whatever_its_length(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": "engine-0", "url": LONG, "models": ["m"] * 40}, {"id": "engine-1", "url": "http://b", "models": []}]
    table_of(rows, ("id", "url", "models"))
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["id", "url", "models"]
    assert first.split()[:2] == ["engine-0", LONG]
    assert second.split() == ["engine-1", "http://b", "[]"]


def test_times_are_local_durations_have_their_unit_and_markup_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    table_of(
        [{"created_at_s": 1_700_000_000.5, "left_s": 12.34, "note": "[red]x[/]"}], ("created_at_s", "left_s", "note")
    )
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["created", "left", "note"]
    local = datetime.fromtimestamp(1_700_000_000).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    assert row.split("  ")[0].strip() == local
    assert row.split()[2:] == ["12.3", "s", "[red]x[/]"]


def test_one_answer_has_the_same_times_and_units(capsys: pytest.CaptureFixture[str]) -> None:
    operator = Operator(connect=lambda: pytest.fail("it is not asked"), as_json=False)
    show(operator, {"id": "a", "created_at_s": 1_700_000_000.5, "revoked_at_s": None, "left_s": 12.34, "in_flight": 3})
    local = datetime.fromtimestamp(1_700_000_000).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    assert capsys.readouterr().out.splitlines() == [
        *("id: a", f"created: {local}", "revoked: -", "left: 12.3 s", "in flight: 3")
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.428571, "0.429"),
        (3.0, "3.0"),
        (12345.678, "12346"),
        (True, "true"),
        (7, "7"),
        ({"a": 1}, '{"a": 1}'),
    ],
)
def test_values_as_people_read_them(value: object, text: str) -> None:
    assert text_of(value) == text
