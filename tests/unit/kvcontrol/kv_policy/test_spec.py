"""Policies as people write them."""

import pytest

from kvcontrol.kv_policy import PolicyError
from kvcontrol.kv_policy.spec import parse_spec, parse_specs


def test_names_and_parameters_are_read_with_any_spaces() -> None:
    first, second, third = parse_specs(" lru, mq( lifetime = 2,ghosts=8 ) ,s3fifo()")
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
        ("mq(lifetime=2,lifetime=3)", "sets 'lifetime' twice"),
        ("", "is not written like name"),
    ],
)
def test_what_is_written_otherwise_is_refused(text: str, why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        parse_spec(text)


@pytest.mark.parametrize(("text", "why"), [("lru,lru", "lru is named twice"), (" , ", "no policy is named")])
def test_a_list_names_each_policy_once(text: str, why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        parse_specs(text)


@pytest.mark.parametrize(
    "text",
    [
        "," * 200_000 + "lru(",
        ",".join(f"a{number}" for number in range(30_000)) + ",a0",
        "lru" + " " * 500_000 + "x",
        "lru(" * 100_000,
    ],
    ids=["commas", "names", "spaces", "parentheses"],
)
def test_a_long_text_is_read_in_steps_that_grow_with_its_length_alone(text: str) -> None:
    with pytest.raises(PolicyError):  # with steps that grow with its square, each would take minutes
        parse_specs(text)
