import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcontrol.core.roles import KVTransport
from kvcontrol.scheduler_ir import Device, Handover, IRBuilder, IRError, IRRequest, Placement, render
from lab.research.ir.reader import parse

SEPARATED = """\
%kv = prefill @p0 {request=r1, start=0, end=2048}
%moved = transfer(%kv) @p0 {request=r1, start=0, end=2048, target=d0, transport=tiers}
evict(%kv) @p0 {request=r1, reason=handed_over}
%answer, %tail = decode(%moved) @d0 {request=r1, start=2048, max_tokens=256}
results %answer, %tail
"""
HYBRID = """\
%kv = prefill @d0 {request=r1, start=0, end=2048}
%answer, %tail = decode(%kv) @d0 {request=r1, start=2048, max_tokens=256}
results %answer, %tail
"""


def request(placement: Placement, request_id: str = "r1") -> IRRequest:
    return IRRequest(request_id=request_id, prompt_tokens=2048, max_tokens=256, placement=placement)


def test_a_hybrid_request_is_a_prefill_and_a_decode() -> None:
    assert render(IRBuilder().build([request(Placement(answer=Device("d0")))])) == HYBRID


def test_a_separated_request_is_computed_handed_over_and_let_go_of() -> None:
    handover = Handover(prefill=Device("p0"), transport=KVTransport.TIERS)
    assert render(IRBuilder().build([request(Placement(answer=Device("d0"), handover=handover))])) == SEPARATED


@pytest.mark.parametrize("text", [HYBRID, SEPARATED])
def test_a_text_is_read_back(text: str) -> None:
    assert render(parse(text)) == text


@settings(deadline=None)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=4, unique=True), st.text(min_size=1))
def test_every_name_of_a_request_and_a_device_survives(ids: list[str], device: str) -> None:
    graph = IRBuilder().build([request(Placement(answer=Device(device)), each) for each in ids])
    assert parse(render(graph)) == graph


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the last line is missing: results"),
        (HYBRID.replace("results %answer, %tail\n", ""), "the last line is missing: results"),
        (HYBRID + "x", "line 4: 'x' comes after the results"),
        ("nonsense\nresults", "line 1: 'nonsense' is no node; one looks like %a = prefill"),
        (HYBRID.replace("prefill", "compute"), "line 1: unknown node 'compute'; known: load, prefill"),
        (
            HYBRID.replace("start=0, end", "begin=0, end"),
            "line 1: a prefill has no 'begin'; it has request, start, end",
        ),
        (HYBRID.replace("start=0, end", "start=x, end"), "line 1: start=x: invalid literal"),
        (HYBRID.replace("start=0, ", ""), "line 1: a prefill lacks something: .*'start'"),
        (HYBRID.replace("start=0, ", "start=0, start=0, "), "line 1: start is given twice"),
        (SEPARATED.replace("=tiers", "=pigeon"), "line 2: transport=pigeon: 'pigeon' is not a valid KVTransport"),
        (HYBRID.replace("@d0", r'@"\x"', 1), "is no JSON string"),
    ],
)
def test_a_text_that_cannot_be_read_names_the_line(text: str, message: str) -> None:
    with pytest.raises(IRError, match=message):
        parse(text)
