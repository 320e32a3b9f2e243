import json

import pytest

from kvcontrol.presets import PresetFileError, Presets, workload_form

SHIPPED = Presets.shipped()


@pytest.mark.parametrize("name", SHIPPED.workloads)
def test_what_is_shown_of_a_workload_is_read_back_as_the_same(name: str) -> None:
    part = SHIPPED.workloads[name]
    assert Presets.workload(name, json.dumps(workload_form(part))) == part


def test_more_workloads_stand_beside_those_that_are_there_and_take_no_name() -> None:
    name = next(iter(SHIPPED.workloads))
    other = Presets.workload("other", json.dumps(workload_form(SHIPPED.workloads[name]) | {"max_batch_size": 1}))
    thief = Presets.workload(name, json.dumps(workload_form(SHIPPED.workloads[name]) | {"max_batch_size": 1}))
    both = SHIPPED.with_workloads([other, thief])
    assert both.preset("other", "cpu").max_batch_size == 1
    assert both.workloads[name] == SHIPPED.workloads[name]


@pytest.mark.parametrize("text", ["[]", "{}", '{"summary": NaN}', '{"a": 1, "a": 2}', "{"])
def test_what_is_no_workload_is_refused(text: str) -> None:
    with pytest.raises(PresetFileError, match="mine:1"):
        Presets.workload("mine", text)
