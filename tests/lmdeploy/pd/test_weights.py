"""Weights that change in one of two instances: what it computed before is handed over to nobody."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvcontrol.core.pd import Ticket, new_ticket
from kvcontrol.core.roles import KVTransport
from tests.support.pd_pair import Pair, complete, hold, pair_of, pd_of, save, stats, tiered_pair_of
from tests.support.sleepers import post
from tests.support.weights import read_weights, update_body

pytestmark = pytest.mark.engine


@pytest.fixture(params=[KVTransport.MIGRATION, pytest.param(KVTransport.TIERS, marks=pytest.mark.slow)])
def pair(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path: Path) -> Iterator[Pair]:
    begin = pair_of if request.param is KVTransport.MIGRATION else tiered_pair_of
    with begin(tiny_llama, tmp_path, "--session-len", "4096", "--max-prefill-token-num", "512") as pair:
        yield pair


def test_what_was_computed_before_other_weights_is_computed_again_where_it_is_answered(
    pair: Pair, tmp_path: Path
) -> None:
    from engines.models.tiny import build_tiny

    other = update_body(read_weights(build_tiny(tmp_path / "other", seed=1)))
    body = {"prompt": "bcdfg hjklm npqrs tvwxz " * 30, "max_tokens": 12, "ignore_eos": True}
    expected = complete(pair.prefill_or_decode, body).text
    ticket = prefilled(pair, body)
    with ThreadPoolExecutor(1) as threads:
        # one more that is being computed when the weights change is answered all the same
        under_way = threads.submit(prefilled, pair, {**body, "prompt": "x y z " * 300})
        assert post(pair.prefill.url, "/update_weights", other).status == 200
        under_way.result()
    source = pair.fetch(ticket) if pair.is_by_ticket else pair.load()
    assert complete(pair.decode, body, header=str(source)).text == expected
    assert stats(pair.prefill).identity.revision != stats(pair.decode).identity.revision
    # what is computed from now on is of other weights, and not taken either
    assert pair.complete({**body, "prompt": "zxwvt srqpn mlkjh gfdcb " * 30}).text
    assert pd_of(pair.decode).fetched == 0
    assert sum(pd_of(pair.decode).recomputed.values()) == 2
    pair.until_idle()


def prefilled(pair: Pair, body: Mapping[str, Any]) -> Ticket:
    """Have a prompt computed, and return its ticket, of no meaning where blocks go through the tiers."""
    ticket = new_ticket()
    if pair.is_by_ticket:
        hold(pair.prefill, body, ticket)
    else:
        save(pair.prefill, body)
    return ticket
