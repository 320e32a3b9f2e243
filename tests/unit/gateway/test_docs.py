"""The page that describes the interface knows every setting and reason."""

from pathlib import Path

from gateway.fingerprint import Gap
from gateway.settings import setting_fields
from gateway.telemetry import Outcome

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_setting_stands_there_as_it_is_described_in_the_code() -> None:
    missing = [
        name for name, field in setting_fields().items() if f"`{name}`" not in PAGE or field.description not in PAGE
    ]
    assert missing == []


def test_every_outcome_and_every_reason_without_a_fingerprint_stands_there() -> None:
    assert [word for word in (*Outcome, *Gap) if word not in PAGE] == []


def test_lines_outside_of_tables_are_readable_in_a_terminal() -> None:
    assert [line for line in PAGE.splitlines() if len(line) > 120 and not line.startswith("|")] == []
