"""Policies as people write them."""

import pytest

from kvcontrol.kv_policy import PolicyError
from kvcontrol.kv_policy.choice import parse_choice, parse_choices


def test_names_and_parameters_are_read_with_any_spaces() -> None:
    first, second, third = parse_choices(" lru, mq( lifetime = 2,ghosts=8 ) ,s3fifo()")
    assert (first.name, first.parameters) == ("lru", {})
    assert (second.text, second.name, second.parameters) == (
        "mq(lifetime=2,ghosts=8)",
        "mq",
        {"lifetime": 2, "ghosts": 8},
    )
    assert third.parameters == {}
    assert second.make(capacity_blocks=4).name == "mq"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mq(lifetime", "is not written like name"),
        ("mq(lifetime)", "is not written like parameter=number"),
        ("mq(lifetime=x)", "is not written like parameter=number"),
        ("mq(=2)", "is not written like parameter=number"),
        ("mq(lifetime=2,lifetime=3)", "sets lifetime twice"),
        ("", "is not written like name"),
    ],
)
def test_what_is_written_otherwise_is_refused(text: str, why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        parse_choice(text)


@pytest.mark.parametrize(("text", "why"), [("lru,lru", "lru is named twice"), (" , ", "no policy is named")])
def test_a_list_names_each_policy_once(text: str, why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        parse_choices(text)
