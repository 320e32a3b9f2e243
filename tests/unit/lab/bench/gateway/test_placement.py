import json
import random
from itertools import pairwise

import pytest

from lab.bench.gateway.corpus import CORPORA, conversations
from lab.bench.gateway.placement import Placed, affinity, hotspot


def chance() -> random.Random:
    return random.Random(1)  # noqa: S311 - texts, no secrets


def test_a_hotspot_is_the_busiest_over_the_mean() -> None:
    even = [Placed("", each) for each in "abcd" * 3]
    assert hotspot(even, 4) == 1
    assert hotspot([Placed("", "a")] * 5, 4) == 4
    assert hotspot([], 4) == 0


def test_affinity_is_the_share_that_went_where_their_like_went_last() -> None:
    assert affinity([Placed("x", "a"), Placed("y", "b"), Placed("x", "a"), Placed("y", "a")]) == 0.5
    assert affinity([Placed("x", "a"), Placed("x", "b"), Placed("x", "b")]) == 0.5
    assert affinity([Placed("", "a"), Placed("", "a")]) is None


@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_has_as_many_bodies_of_about_its_size_as_asked_for(name: str) -> None:
    asks = CORPORA[name](chance(), 4096, 200)
    assert len(asks) == 200
    assert all(4000 < len(each.body) < 4400 for each in asks)
    different = len({each.body for each in asks})
    assert different == {"hot": 64, "cold": 200, "mixed": 84, "shared": 200}[name]


@pytest.mark.parametrize("name", ["hot", "mixed"])
@pytest.mark.parametrize("backends", [2, 4, 8])
def test_who_merely_takes_turns_keeps_together_what_chance_does(name: str, backends: int) -> None:
    asks = CORPORA[name](chance(), 20, 3000)
    kept = affinity([Placed(each.key, str(number % backends)) for number, each in enumerate(asks)])
    assert kept == pytest.approx(1 / backends, abs=0.05)


def test_each_turn_of_a_conversation_begins_with_all_that_was_said() -> None:
    (turns,) = conversations(chance(), sessions=1, turns=4, turn_bytes=100)
    said = [json.loads(each.body)["messages"] for each in turns]
    assert [len(each) for each in said] == [1, 3, 5, 7]
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(said))
    assert len({each.key for each in turns}) == 1
