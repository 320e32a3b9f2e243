"""Whatever PyYAML can't read is one kind of error."""

import pytest
import yaml

from kvcontrol.core.yaml_text import load_yaml


def test_what_can_be_read_is_what_it_says() -> None:
    assert load_yaml("a: [1, 2.5, null, true, text]") == {"a": [1, 2.5, None, True, "text"]}
    assert load_yaml(b"") is None


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "a: 2001-13-45",
        "a: 2001-01-01 00:00:00 +99:00",
        "a: !!timestamp x",
        "a: !!int many",
        "a: !!int ''",
        "a: !!float many",
        "a: !!bool 7",
        "a: !!binary x",
        "a: !!python/object:os.system x",
        "a: 0x_",
        "a: " + "9" * 5_000,
        "a: 0x" + "f" * 5_000,
        "[" * 3_000,
        "{a: " * 3_000,
        b"\xff\xfe\xfa",
    ],
)
def test_what_can_not_be_read_is_an_error_of_yaml(text: str | bytes) -> None:
    with pytest.raises(yaml.YAMLError):
        load_yaml(text)
