"""A call that pauses in its midst and goes on later."""

import threading

import pytest

from engines.lmdeploy.schedule.stepped_call import SteppedCall


def test_a_call_runs_a_part_at_a_time_and_gives_its_result() -> None:
    order: list[str] = []

    def work() -> int:
        for part in ("first", "second"):
            order.append(part)
            call.pause()
        order.append("last")
        return 7

    call = SteppedCall(work)
    assert not call.resume()
    order.append("between")
    assert not call.resume()
    assert call.resume()
    assert order == ["first", "between", "second", "last"]
    assert (call.result, call.is_over, call.resume()) == (7, True, True)


def test_a_call_that_never_pauses_is_over_at_once() -> None:
    call = SteppedCall(lambda: 3)
    assert call.resume()
    assert call.result == 3


def test_what_the_call_raises_is_raised_where_it_is_resumed() -> None:
    def work() -> None:
        call.pause()
        raise ValueError("of the second part")

    call = SteppedCall(work)
    assert not call.resume()
    with pytest.raises(ValueError, match="of the second part"):
        call.resume()
    assert call.is_over


def test_a_call_leaves_no_thread_behind_once_it_is_over() -> None:
    call = SteppedCall(threading.get_ident)
    call.resume()
    call._thread.join()
    assert call.result != threading.get_ident()
