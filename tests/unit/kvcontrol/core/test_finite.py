import json

import pytest

from kvcontrol.core.finite import non_finite


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"params": {"small": NaN}}', "params.small"),
        ('{"params": {"small": 1e400}}', "params.small"),
        ('[1, {"a": [0.5, -Infinity]}]', "1.a.1"),
        ("NaN", "body"),
        ('{"a": [1, 1.5, "NaN", true, null], "b": {}}', None),
    ],
)
def test_a_number_that_is_not_finite_is_found_by_its_path(text: str, path: str | None) -> None:
    assert non_finite(json.loads(text)) == path


def test_deep_nesting_is_no_error() -> None:
    nested: object = float("nan")
    for _ in range(10_000):
        nested = [nested]
    assert (non_finite(nested) or "").startswith("0.0.0")
