"""Every pass, alone and after the others: run in the reference interpreter, old and new graph answer the same."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcontrol.scheduler_ir import (
    Device,
    IRBuilder,
    IRGraph,
    IROptimizer,
    IRPass,
    IRRequest,
    PassContext,
    Placement,
    PrefixCacheAwarePass,
    SharedPrefix,
    render,
)
from kvcontrol.scheduler_ir.nodes import NodeType
from lab.research.ir.interpreter import interpret
from lab.research.ir.passes import (
    BatchingEfficiencyPass,
    FuseTransfersPass,
    MemoryAwarePreemptionPass,
    OverlapPass,
    PriorityBasedPass,
    all_passes,
)
from lab.research.ir.reader import parse
from lab.research.ir.timeline import Paces, timeline
from tests.support.examples import examples
from tests.support.ir_requests import contexts, several

PASSES = all_passes()
PACES = Paces()
HERE = Placement(answer=Device("h0"))
LIGHT = settings(max_examples=examples(30), deadline=None)


def built(context: PassContext, *passes: IRPass) -> IRGraph:
    graph = IRBuilder().build(list(context.requests.values()))
    return IROptimizer(passes, context).optimize(graph)


@pytest.mark.parametrize("one", PASSES, ids=lambda each: each.name)
@LIGHT
@given(data=st.data())
def test_a_pass_alone_keeps_every_answer(one: IRPass, data: st.DataObject) -> None:
    asked = data.draw(several())
    context = data.draw(contexts(asked, capacity=True))
    limits = context.devices if one.name == MemoryAwarePreemptionPass.name else {}
    assert interpret(built(context, one), asked, limits).answers == interpret(built(context), asked).answers


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_all_passes_together_keep_every_answer_within_all_limits(data: st.DataObject) -> None:
    asked = data.draw(several())
    context = data.draw(contexts(asked, capacity=True))
    graph = built(context, *PASSES)
    made = interpret(graph, asked, context.devices)
    assert made.answers == interpret(built(context), asked).answers
    for device, peak in made.peak_tokens.items():
        assert peak <= (context.devices[device].capacity_tokens or peak)
    assert parse(render(graph)) == graph


@settings(max_examples=examples(120), deadline=None)
@given(data=st.data())
def test_passes_in_any_order_keep_every_answer(data: st.DataObject) -> None:
    asked = data.draw(several(sharing=data.draw(st.booleans())))
    context = data.draw(contexts(asked))
    passes = data.draw(st.permutations(PASSES) | st.lists(st.sampled_from(PASSES), max_size=6))
    assert interpret(built(context, *passes), asked).answers == interpret(built(context), asked).answers


def test_prompts_that_changed_places_after_they_were_shared_are_shared_again() -> None:
    shared = (SharedPrefix(key=b"a", end=1),)
    asked = [
        IRRequest(
            request_id=f"r{place}", prompt_tokens=tokens, max_tokens=3, placement=HERE, priority=priority, shared=shared
        )
        for place, (tokens, priority) in enumerate(((2, 0), (2, -2), (1, 2)))
    ]
    context = PassContext.of(asked)
    sharing, ordering = PrefixCacheAwarePass(), PriorityBasedPass()
    for passes in ([sharing, ordering, sharing], [*PASSES, *PASSES]):
        assert interpret(built(context, *passes), asked).answers == interpret(built(context), asked).answers


@pytest.mark.parametrize("place", range(len(PASSES)), ids=lambda place: PASSES[place].name)
@LIGHT
@given(data=st.data())
def test_a_pass_changes_nothing_the_second_time(place: int, data: st.DataObject) -> None:
    asked = data.draw(several())
    context = data.draw(contexts(asked, capacity=True))
    once = built(context, *PASSES[: place + 1])
    again = PASSES[place].run(once, context)
    assert again.graph == once
    assert again.notes == ()


@LIGHT
@given(data=st.data())
def test_what_is_cached_or_shared_is_not_computed_again(data: st.DataObject) -> None:
    asked = data.draw(several())
    context = data.draw(contexts(asked))
    before = interpret(built(context), asked)
    after = interpret(built(context, PrefixCacheAwarePass()), asked)
    assert after.computed_tokens <= before.computed_tokens
    assert after.moved_tokens <= before.moved_tokens
    for request in asked:
        held = [min(run.end, request.prompt_tokens - 1) for run in request.cached_on(request.placement.prefill)]
        assert after.computed_tokens <= before.computed_tokens - max(held, default=0)


@LIGHT
@given(data=st.data())
def test_requests_go_by_importance_and_then_by_deadline(data: st.DataObject) -> None:
    asked = data.draw(several())
    context = data.draw(contexts(asked))
    order = list(interpret(built(context, PriorityBasedPass()), asked).answers)
    ranked = sorted(
        asked, key=lambda each: (-each.priority, float("inf") if each.deadline_s is None else each.deadline_s)
    )
    assert order == [each.request_id for each in ranked]


@LIGHT
@given(data=st.data())
def test_fused_transfers_move_the_same_in_no_more_transfers(data: st.DataObject) -> None:
    asked = data.draw(several())
    context = data.draw(contexts(asked))
    graphs = built(context, PrefixCacheAwarePass()), built(context, PrefixCacheAwarePass(), FuseTransfersPass())
    counts = [sum(node.node_type is NodeType.TRANSFER for node in graph) for graph in graphs]
    assert counts[1] <= counts[0]
    assert interpret(graphs[0], asked).moved_tokens == interpret(graphs[1], asked).moved_tokens


@LIGHT
@given(data=st.data())
def test_an_answer_comes_no_later_because_its_prompt_moves_along_with_its_prefill(data: st.DataObject) -> None:
    asked = data.draw(several(most=1))
    context = data.draw(contexts(asked))
    before = built(context, PrefixCacheAwarePass(), BatchingEfficiencyPass())
    after = OverlapPass().run(before, context).graph
    earlier, later = timeline(after, PACES), timeline(before, PACES)
    for request in context.requests:
        assert earlier.answered_s[request] <= later.answered_s[request] + 1e-9


@LIGHT
@given(data=st.data())
def test_memory_that_suffices_changes_nothing(data: st.DataObject) -> None:
    asked = data.draw(several())
    context = data.draw(contexts(asked))
    graph = built(context, *PASSES)
    assert MemoryAwarePreemptionPass().run(graph, context).graph is graph
