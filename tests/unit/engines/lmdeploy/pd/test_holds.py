"""What is held, under every order of finishing, fetching, leaving and running out of time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from engines.lmdeploy.pd.holds import Holds, Timer
from engines.lmdeploy.pd.wire import TransferError
from kvcontrol.core.pd import Ticket

A, B = Ticket("a" * 32), Ticket("b" * 32)


@dataclass
class Engine:
    """Sessions by id; ``end`` goes the way of the real one: asks whether it must wait, then tells that it is gone."""

    held: set[int] = field(default_factory=set)
    alive: set[int] = field(default_factory=set)
    holds: Holds | None = None

    def is_held(self, session_id: int) -> bool:
        return session_id in self.held

    def end(self, session_id: int) -> None:
        assert self.holds is not None
        if self.holds.must_wait(session_id):
            return
        self.holds.gone(session_id)
        self.held.discard(session_id)
        self.alive.discard(session_id)

    def blocks(self, session_id: int) -> int:
        return 3 if session_id in self.alive else 0


@dataclass
class Later:
    """``call_later`` by hand."""

    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)

    def __call__(self, delay_s: float, call: Callable[..., Any], *arguments: Any) -> Timer:
        assert delay_s == 30.0
        self.calls.append((call, arguments))
        return self

    def cancel(self) -> None:
        """It is never run by itself."""

    def run_out(self) -> None:
        for call, arguments in self.calls:
            call(*arguments)


@pytest.fixture
def engine() -> Engine:
    engine = Engine(held={1}, alive={1, 2})
    engine.holds = Holds(engine, lease_s=30.0)
    assert engine.holds.expect(A, 1)
    return engine


@pytest.fixture
def holds(engine: Engine) -> Holds:
    assert engine.holds is not None
    return engine.holds


def test_a_ticket_or_session_is_noted_once(holds: Holds) -> None:
    assert not holds.expect(A, 2)
    assert not holds.expect(B, 1)
    assert holds.expect(B, 2)


def test_what_was_taken_is_freed(engine: Engine, holds: Holds) -> None:
    assert holds.begin(A) == 1
    assert holds.still(A)
    holds.end(A, taken=True)
    assert engine.alive == {2}
    assert (holds.counts.handed_over, len(holds)) == (1, 0)


def test_what_was_not_taken_may_be_fetched_again(engine: Engine, holds: Holds) -> None:
    holds.begin(A)
    holds.end(A, taken=False)
    assert holds.begin(A) == 1
    assert 1 in engine.alive


def test_two_do_not_fetch_at_once(holds: Holds) -> None:
    holds.begin(A)
    with pytest.raises(TransferError, match="by another"):
        holds.begin(A)


def test_an_unknown_ticket_and_an_unfinished_prompt_are_refused(engine: Engine, holds: Holds) -> None:
    with pytest.raises(TransferError, match="nothing is held"):
        holds.begin(B)
    engine.held.clear()
    with pytest.raises(TransferError, match="not computed yet"):
        holds.begin(A)


def test_a_lease_that_runs_out_frees(engine: Engine, holds: Holds) -> None:
    later = Later()
    assert holds.keep(1, later)
    assert holds.keep(1, later)
    assert len(later.calls) == 1
    later.run_out()
    assert engine.alive == {2}
    assert (holds.counts.expired, holds.counts.released, len(holds)) == (1, 0, 0)


def test_a_lease_that_runs_out_waits_for_the_reader(engine: Engine, holds: Holds) -> None:
    later = Later()
    holds.keep(1, later)
    holds.begin(A)
    later.run_out()
    assert 1 in engine.alive
    assert not holds.still(A)
    holds.end(A, taken=False)
    assert engine.alive == {2}


def test_a_prompt_that_was_given_up_unfinished_is_not_kept(engine: Engine, holds: Holds) -> None:
    engine.held.clear()
    assert not holds.keep(1, Later())
    engine.end(1)
    assert (holds.counts.released, len(holds)) == (1, 0)


def test_only_what_is_finished_counts_as_held(engine: Engine, holds: Holds) -> None:
    holds.expect(B, 2)
    assert holds.held() == (1, 3)
    engine.end(1)
    assert holds.held() == (0, 0)


def test_a_lease_has_begun_when_its_client_is_done_and_until_it_is_gone(engine: Engine, holds: Holds) -> None:
    assert not holds.waits(1)
    assert not holds.waits(2)
    holds.keep(1, Later())
    assert holds.waits(1)
    engine.end(1)
    assert not holds.waits(1)
