"""What is run live is a part of the fleet with that part of its load, and the prediction is of the same."""

from array import array
from pathlib import Path

import pytest

from engines.sim.profile import load_profile
from kvgate.failure import CommandError
from kvgate.host.machine import core_count
from lab.plan.live import slice_of
from lab.simulate.live import spread
from lab.simulate.study import Study
from lab.simulate.workload import Workload
from lab.traces import Request


def request(at_s: float, *, tokens: int = 1024, output: int | None = 8) -> Request:
    return Request(
        block_ids=array("q", [1, 2]), block_tokens=512, prompt_tokens=tokens, at_s=at_s, output_tokens=output
    )


def study(instances: int) -> Study:
    return Study(
        trace=Path("trace"), profile=load_profile("h100-7b"), instances=instances, routers=("cost_aware",), copies=3
    )


def test_requests_of_one_moment_come_evenly_until_the_next() -> None:
    times = [each.at_s for each in spread([request(at_s) for at_s in (0.0, 0.0, 3.0, 3.0, 3.0, 9.0, 9.0)])]
    assert times == [0.0, 1.5, 3.0, 5.0, 7.0, 9.0, 9.0]


def test_a_part_of_the_fleet_gets_that_part_of_the_load() -> None:
    workload = Workload(requests=[request(float(second)) for second in range(400)], copies=3, speed=2.0)
    part = slice_of(study(1000), workload, 30.0)
    assert 1 <= part.instances <= core_count()
    assert part.speed == pytest.approx(3 * 2.0 * part.instances / 1000)
    assert len(part.requests) == int(30.0 * part.speed) + 1
    assert str(part).startswith(f"{part.instances} of 1000 instances, ")


def test_a_fleet_that_this_machine_carries_is_run_whole() -> None:
    part = slice_of(study(1), Workload(requests=[request(float(second)) for second in range(9)]), 60.0)
    assert (part.instances, part.speed, len(part.requests)) == (1, 1.0, 9)
    assert str(part) == "the whole fleet, 9 requests in 60 s"


def test_what_no_engine_takes_is_left_out_and_answers_have_their_length() -> None:
    workload = Workload(requests=[request(0.0, tokens=10**6), request(1.0, output=None)], output_tokens=77)
    part = slice_of(study(1), workload, 60.0)
    assert [each.output_tokens for each in part.requests] == [77]
    with pytest.raises(CommandError, match="no request of the trace fits"):
        slice_of(study(1), Workload(requests=[request(0.0, tokens=10**6)]), 60.0)
