"""One instance prefills, the other goes on: real processes, LMDeploy's own migration, our TCP back end under it."""

import random
from typing import Any

import pytest

from kvcontrol.core.pd import PD_HEADER, Fetch, Hold, new_ticket
from tests.support.pd_pair import Pair, at_once, complete, hold, pd_of, post, used_blocks
from tests.support.processes import eventually

pytestmark = pytest.mark.engine

LENGTHS = (5, 15, 16, 17, 63, 64, 65, 130, 511, 512, 513, 1100)


def prompt_of(letters: int, seed: int = 0) -> str:
    """A text of mostly one token a letter, so that lengths fall below, at and above blocks and chunks."""
    dice = random.Random(letters * 1000 + seed)  # noqa: S311
    return "".join(dice.choice("bcdfghjklmnpqrstvwxz") for _ in range(letters))


def body_of(letters: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt_of(letters, seed), "max_tokens": 12, "ignore_eos": True, **more}


@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_those_of_one_instance_at_every_length(pair: Pair, *, stream: bool) -> None:
    before = pd_of(pair.decode)
    bodies = [body_of(letters) for letters in LENGTHS]
    expected = at_once(lambda body: complete(pair.decode, body), bodies)
    found = at_once(lambda body: pair.complete(body, stream=stream), bodies)
    assert [answer.text for answer in found] == [answer.text for answer in expected]
    for answer, alone in zip(found, expected, strict=True):
        assert answer.usage["prompt_tokens"] == alone.usage["prompt_tokens"]
        assert answer.usage["completion_tokens"] == 12
        assert not (answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        assert answer.finish_reason == "length"
    after = pd_of(pair.decode)
    assert after.recomputed == before.recomputed
    assert after.fetched == before.fetched + len(LENGTHS)
    pair.until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_that_of_one_instance(pair: Pair, *, stream: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": "Tell me about lighthouses. " * 30}],
        "max_tokens": 12,
        "ignore_eos": True,
    }
    expected, found = complete(pair.decode, body), pair.complete(body, stream=stream)
    assert found.text == expected.text
    assert found.usage["prompt_tokens"] == expected.usage["prompt_tokens"]
    assert found.usage["completion_tokens"] == expected.usage["completion_tokens"] == 12
    pair.until_idle()


@pytest.mark.parametrize("new_tokens", [1, 2])
def test_a_short_answer_is_no_longer_than_asked_for(pair: Pair, new_tokens: int) -> None:
    body = body_of(100, max_tokens=new_tokens)
    expected, found = complete(pair.decode, body), pair.complete(body)
    assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
    assert found.usage["completion_tokens"] == new_tokens


def test_a_first_token_that_ends_the_answer_ends_it(pair: Pair) -> None:
    for seed in range(50):
        body = body_of(100, seed)
        first = complete(pair.decode, {**body, "max_tokens": 1}).text
        if first.strip().isalpha() and first.isascii():
            break
    else:
        pytest.fail("no prompt is answered with a word")
    with_stop = {**body, "stop": [first], "ignore_eos": False}  # LMDeploy takes ignore_eos for both
    expected, found = complete(pair.decode, with_stop), pair.complete(with_stop)
    assert (found.text, found.finish_reason, found.usage) == (expected.text, expected.finish_reason, expected.usage)
    assert found.finish_reason == "stop"
    pair.until_idle()


def test_seeded_sampling_is_that_of_one_instance(pair: Pair) -> None:
    chat = [{"role": "user", "content": prompt_of(200)}]
    body = {"messages": chat, "temperature": 1.0, "top_k": 50, "seed": 7, "max_tokens": 20, "ignore_eos": True}
    assert pair.complete(body).text == complete(pair.decode, body).text


def test_an_unknown_ticket_costs_a_prefill_and_not_the_answer(pair: Pair) -> None:
    before = pd_of(pair.decode).recomputed.get("refused", 0)
    body = body_of(90)
    found = complete(pair.decode, body, header=str(pair.fetch(new_ticket())))
    assert found.text == complete(pair.decode, body).text
    assert pd_of(pair.decode).recomputed["refused"] == before + 1


def test_a_ticket_is_good_once_and_for_its_own_prompt(pair: Pair) -> None:
    body, ticket = body_of(90), new_ticket()
    hold(pair.prefill, body, ticket)
    before = pd_of(pair.decode).recomputed
    other = body_of(91)
    found = complete(pair.decode, other, header=str(pair.fetch(ticket)))
    assert found.text == complete(pair.decode, other).text
    assert pd_of(pair.decode).recomputed.get("tokens", 0) == before.get("tokens", 0) + 1
    fetched = pd_of(pair.decode).fetched
    for _ in range(2):  # it was not used up by the wrong prompt, and is by the right one
        assert complete(pair.decode, body, header=str(pair.fetch(ticket))).text == complete(pair.decode, body).text
    assert pd_of(pair.decode).fetched == fetched + 1
    pair.until_idle()


def test_a_host_that_is_no_peer_is_not_asked(pair: Pair) -> None:
    body = body_of(40)
    strange = Fetch(ticket=new_ticket(), host="192.0.2.1", port=9)
    assert complete(pair.decode, body, header=str(strange)).text == complete(pair.decode, body).text
    assert pd_of(pair.decode).recomputed["unlisted"] >= 1


def test_roles_refuse_what_they_can_not_do(pair: Pair) -> None:
    ticket = new_ticket()
    refusals = [
        (pair.prefill, None, "only prefills"),
        (pair.prefill, str(pair.fetch(ticket)), "takes over no prompt"),
        (pair.decode, str(Hold(ticket=ticket)), "holds no prompt"),
        (pair.decode, "fetch;ticket=abc", PD_HEADER),
    ]
    for instance, header, why in refusals:
        answer = post(instance, body_of(20), stream=False, header=header)
        assert answer.status_code == 400, answer.text
        assert why in answer.text
    for field, value in (("preserve_cache", True), ("migration_request", {"remote_engine_id": "http://127.0.0.1:1"})):
        for instance in (pair.prefill, pair.decode):
            answer = post(instance, body_of(20, max_tokens=1, **{field: value}), stream=False, header=None)
            assert answer.status_code == 400, answer.text
            assert "by the gateway's ticket alone" in answer.text


def test_a_held_prompt_keeps_its_blocks_until_it_is_fetched(pair: Pair) -> None:
    ticket = new_ticket()
    hold(pair.prefill, body_of(100), ticket)
    eventually(lambda: pd_of(pair.prefill).held_requests == 1, 30, "a held prompt")
    assert pd_of(pair.prefill).held_blocks == used_blocks(pair.prefill) > 0
    complete(pair.decode, body_of(100), header=str(pair.fetch(ticket)))
    pair.until_idle()
    assert pd_of(pair.prefill).held_requests == 0
