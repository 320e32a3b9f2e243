from collections.abc import Sequence

from gateway.registry.discovery.losses import LossWindow
from gateway.registry.instance import InstanceSpec
from kvcontrol.core.ids import InstanceId

WINDOW_S = 6.0


def named(*numbers: int, port: int = 9001) -> Sequence[InstanceSpec]:
    return [InstanceSpec(id=InstanceId(f"e{each}"), url=f"http://10.0.0.{each}:{port}") for each in numbers]


def window(*numbers: int) -> LossWindow:
    losses = LossWindow(WINDOW_S)
    assert losses.judge(named(*numbers), 0.0) is None
    return losses


def test_half_of_the_instances_may_be_lost_at_once() -> None:
    assert window(1, 2, 3, 4).judge(named(1, 2), 10.0) is None


def test_a_larger_loss_is_accepted_once_it_lasted_the_window() -> None:
    losses = window(1, 2, 3, 4)
    loss = losses.judge(named(1), 10.0)
    assert loss is not None
    assert ([each.id for each in loss.lost], loss.of, loss.until) == (["e2", "e3", "e4"], 4, 16.0)
    assert losses.judge(named(1), 15.9) is not None
    assert losses.judge(named(1), 16.0) is None
    assert losses.judge(named(1), 16.0) is None


def test_a_further_loss_starts_the_time_again() -> None:
    losses = window(1, 2, 3, 4)
    losses.judge(named(1), 10.0)
    further = losses.judge([], 15.5)
    assert further is not None
    assert (len(further.lost), further.until) == (4, 21.5)
    assert losses.judge([], 16.0) is not None
    assert losses.judge([], 21.5) is None


def test_the_loss_of_a_new_instance_starts_the_time_again() -> None:
    losses = window(1, 2)
    losses.judge(named(3), 10.0)
    loss = losses.judge([], 15.0)
    assert loss is not None
    assert loss.until == 21.0


def test_an_instance_that_comes_back_does_not_start_the_time_again() -> None:
    losses = window(1, 2, 3, 4, 5)
    losses.judge(named(1), 10.0)
    loss = losses.judge(named(1, 2), 12.0)
    assert loss is not None
    assert loss.until == 16.0
    assert losses.judge(named(1, 2, 3), 13.0) is None


def test_new_instances_do_not_outvote_a_loss() -> None:
    losses = window(1, 2)
    for now in (10.0, 11.0):
        loss = losses.judge(named(3, 4, 5, 6), now)
        assert loss is not None
        assert (loss.of, loss.until) == (2, 16.0)


def test_losses_within_the_window_add_up() -> None:
    losses = window(1, 2, 3, 4)
    assert losses.judge(named(1, 2), 10.0) is None
    loss = losses.judge(named(1), 15.9)
    assert loss is not None
    assert (sorted(each.id for each in loss.lost), loss.of) == (["e2", "e3", "e4"], 4)


def test_losses_further_apart_than_the_window_do_not_add_up() -> None:
    losses = window(1, 2, 3, 4)
    assert losses.judge(named(1, 2), 10.0) is None
    assert losses.judge(named(1), 16.0) is None


def test_an_accepted_loss_no_longer_counts() -> None:
    losses = window(1, 2, 3, 4, 5, 6)
    losses.judge(named(1, 2), 10.0)
    assert losses.judge(named(1, 2), 16.0) is None
    assert losses.judge(named(1), 16.0) is None


def test_a_rolling_replacement_over_more_than_the_window_is_never_a_large_loss() -> None:
    losses, now = window(1, 2, 3, 4), 10.0
    present = [1, 2, 3, 4]
    for old, new in zip((1, 2, 3, 4), (5, 6, 7, 8), strict=True):
        present = [each for each in (*present, new) if each != old]
        now += 2.0
        assert losses.judge(named(*present), now) is None


def test_a_new_url_counts_as_a_loss_and_a_new_id_does_not() -> None:
    assert window(1, 2).judge(named(1, 2, port=9002), 10.0) is not None
    renamed = [InstanceSpec(id=InstanceId(f"new-{each.id}"), url=each.url) for each in named(1, 2)]
    assert window(1, 2).judge(renamed, 10.0) is None


def test_a_loss_has_to_last_anew_after_the_source_could_not_be_read() -> None:
    losses = window(1, 2)
    losses.judge([], 10.0)
    losses.interrupt()
    loss = losses.judge([], 15.0)
    assert loss is not None
    assert loss.until == 21.0
