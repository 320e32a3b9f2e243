"""What each pass makes of a small graph, as text."""

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.roles import KVTransport
from kvcontrol.scheduler_ir import (
    CachedRun,
    Device,
    DeviceLimits,
    Handover,
    IRBuilder,
    IRError,
    IRGraph,
    IROptimizer,
    IRRequest,
    PassContext,
    Placement,
    PrefixCacheAwarePass,
    Rewritten,
    SharedPrefix,
    render,
)
from kvcontrol.scheduler_ir.nodes import PrefillConfig
from kvcontrol.scheduler_ir.optimizer import IRPass
from lab.research.ir.interpreter import check_batches, interpret
from lab.research.ir.passes import (
    BatchingEfficiencyPass,
    FuseTransfersPass,
    LifetimeAwarePass,
    MemoryAwarePreemptionPass,
    OverlapPass,
    PriorityBasedPass,
    all_passes,
)
from lab.research.ir.reader import parse

P, D = Device("p"), Device("d")
HERE = Placement(answer=D)
ELSEWHERE = Placement(answer=D, handover=Handover(prefill=P, transport=KVTransport.TIERS))


def request(request_id: str = "r", placement: Placement = HERE, **facts: object) -> IRRequest:
    values = {"prompt_tokens": 100, "max_tokens": 8} | facts
    return IRRequest(request_id=request_id, placement=placement, **values)  # type: ignore[arg-type]


def made(asked: list[IRRequest], *passes: IRPass, **limits: DeviceLimits) -> str:
    optimizer = IROptimizer(passes, PassContext.of(asked, **limits))
    return render(IRBuilder().build(asked).optimize(optimizer))


def test_what_is_cached_on_either_side_is_loaded_and_only_the_rest_computed_and_moved() -> None:
    runs = (
        CachedRun(device=P, tier=CacheTier.HBM, end=32),
        CachedRun(device=P, tier=CacheTier.DDR, end=64),
        CachedRun(device=D, tier=CacheTier.HBM, end=48),
    )
    assert made([request(placement=ELSEWHERE, cached=runs)], PrefixCacheAwarePass()) == (
        "%cached = load @p {request=r, start=0, end=32, tier=HBM}\n"
        "%cached.1 = load @p {request=r, start=32, end=64, tier=DDR}\n"
        "%kv = prefill(%cached, %cached.1) @p {request=r, start=64, end=100}\n"
        "%cached.2 = load @d {request=r, start=0, end=48, tier=HBM}\n"
        "%moved.1 = transfer(%cached.1) @p {request=r, start=48, end=64, target=d, transport=tiers}\n"
        "%moved = transfer(%kv) @p {request=r, start=64, end=100, target=d, transport=tiers}\n"
        "evict(%cached, %cached.1, %kv) @p {request=r, reason=handed_over}\n"
        "%answer, %tail = decode(%cached.2, %moved.1, %moved) @d {request=r, start=100, max_tokens=8}\n"
        "results %answer, %tail\n"
    )


def test_batches_of_prompts_that_wait_for_each_other_are_dissolved_and_can_be_made_anew() -> None:
    shared = (SharedPrefix(key=b"k", end=16),)
    asked = [request(name, shared=shared, prompt_tokens=20) for name in ("a", "b")]
    batched = (BatchingEfficiencyPass(), PrefixCacheAwarePass())
    for passes, batches in ((batched, [None, None]), ((*batched, BatchingEfficiencyPass()), [1, 3])):
        graph = IRBuilder().build(asked).optimize(IROptimizer(passes, PassContext.of(asked)))
        assert interpret(graph, asked).computed_tokens == 24
        assert [node.config.batch for node in graph if isinstance(node.config, PrefillConfig)] == batches


def test_a_prefix_that_two_share_is_computed_once() -> None:
    shared = (SharedPrefix(key=b"system", end=60),)
    assert made([request("a", shared=shared), request("b", shared=shared)], PrefixCacheAwarePass()) == (
        "%kv0 = prefill @d {request=a, start=0, end=100}\n"
        "%answer0, %tail0 = decode(%kv0) @d {request=a, start=100, max_tokens=8}\n"
        "%shared = load(%kv0) @d {request=b, start=0, end=60, tier=HBM}\n"
        "%kv1 = prefill(%shared) @d {request=b, start=60, end=100}\n"
        "%answer1, %tail1 = decode(%shared, %kv1) @d {request=b, start=100, max_tokens=8}\n"
        "results %answer0, %tail0, %answer1, %tail1\n"
    )


def test_the_last_token_of_a_prompt_that_is_cached_whole_is_computed() -> None:
    run = CachedRun(device=D, tier=CacheTier.HBM, end=100)
    assert "prefill(%cached) @d {request=r, start=99, end=100}" in made(
        [request(cached=(run,))], PrefixCacheAwarePass()
    )


def test_the_more_important_request_goes_first_and_takes_along_what_it_needs() -> None:
    shared = (SharedPrefix(key=b"system", end=60),)
    asked = [
        request("low", priority=-1, shared=shared),
        request("middle"),
        request("high", priority=1, shared=shared),
    ]
    assert made(asked, PrefixCacheAwarePass(), PriorityBasedPass()) == (
        "%kv0 = prefill @d {request=low, start=0, end=100}\n"
        "%shared = load(%kv0) @d {request=high, start=0, end=60, tier=HBM}\n"
        "%kv2 = prefill(%shared) @d {request=high, start=60, end=100}\n"
        "%answer2, %tail2 = decode(%shared, %kv2) @d {request=high, start=100, max_tokens=8}\n"
        "%kv1 = prefill @d {request=middle, start=0, end=100}\n"
        "%answer1, %tail1 = decode(%kv1) @d {request=middle, start=100, max_tokens=8}\n"
        "%answer0, %tail0 = decode(%kv0) @d {request=low, start=100, max_tokens=8}\n"
        "results %answer0, %tail0, %answer1, %tail1, %answer2, %tail2\n"
    )


def test_what_inherits_importance_does_not_change_the_order_of_equals_when_the_pass_runs_again() -> None:
    shared = (SharedPrefix(key=b"system", end=60),)
    asked = [request("first"), request("second", shared=shared), request("high", priority=1, shared=shared)]
    once = made(asked, PrefixCacheAwarePass(), PriorityBasedPass())
    again = PriorityBasedPass().run(parse(once), PassContext.of(asked))
    assert (render(again.graph), again.notes) == (once, ())


def test_long_prompts_are_computed_in_chunks_and_short_ones_together() -> None:
    asked = [request("long", prompt_tokens=70), request("a", prompt_tokens=20), request("b", prompt_tokens=10)]
    limits = DeviceLimits(prefill_batch_tokens=32, decode_batch_requests=2)
    assert made(asked, BatchingEfficiencyPass(), d=limits) == (
        "%kv0.chunk = prefill @d {request=long, start=0, end=32, batch=1}\n"
        "%kv0.chunk.1 = prefill(%kv0.chunk) @d {request=long, start=32, end=64, batch=2}\n"
        "%kv0.chunk.2 = prefill(%kv0.chunk, %kv0.chunk.1) @d {request=long, start=64, end=70, batch=3}\n"
        "%kv0 = join(%kv0.chunk, %kv0.chunk.1, %kv0.chunk.2) @d {request=long}\n"
        "%answer0, %tail0 = decode(%kv0) @d {request=long, start=70, max_tokens=8, batch=4}\n"
        "%kv1 = prefill @d {request=a, start=0, end=20, batch=3}\n"
        "%answer1, %tail1 = decode(%kv1) @d {request=a, start=20, max_tokens=8, batch=4}\n"
        "%kv2 = prefill @d {request=b, start=0, end=10, batch=5}\n"
        "%answer2, %tail2 = decode(%kv2) @d {request=b, start=10, max_tokens=8, batch=6}\n"
        "results %answer0, %tail0, %answer1, %tail1, %answer2, %tail2\n"
    )


def test_chunks_move_as_soon_as_they_are_computed() -> None:
    limits = DeviceLimits(prefill_batch_tokens=50)
    assert made([request(placement=ELSEWHERE)], BatchingEfficiencyPass(), OverlapPass(), p=limits) == (
        "%kv.chunk = prefill @p {request=r, start=0, end=50, batch=1}\n"
        "%moved.part = transfer(%kv.chunk) @p {request=r, start=0, end=50, target=d, transport=tiers}\n"
        "%kv.chunk.1 = prefill(%kv.chunk) @p {request=r, start=50, end=100, batch=2}\n"
        "%moved.part.1 = transfer(%kv.chunk.1) @p {request=r, start=50, end=100, target=d, transport=tiers}\n"
        "%moved = join(%moved.part, %moved.part.1) @d {request=r}\n"
        "evict(%kv.chunk, %kv.chunk.1) @p {request=r, reason=handed_over}\n"
        "%answer, %tail = decode(%moved) @d {request=r, start=100, max_tokens=8, batch=3}\n"
        "results %answer, %tail\n"
    )


def test_pieces_that_are_used_together_move_in_one_transfer() -> None:
    runs = (
        CachedRun(device=P, tier=CacheTier.HBM, end=32),
        CachedRun(device=P, tier=CacheTier.DDR, end=64),
    )
    assert made([request(placement=ELSEWHERE, cached=runs)], PrefixCacheAwarePass(), FuseTransfersPass()) == (
        "%cached = load @p {request=r, start=0, end=32, tier=HBM}\n"
        "%cached.1 = load @p {request=r, start=32, end=64, tier=DDR}\n"
        "%cached.joined = join(%cached, %cached.1) @p {request=r}\n"
        "%kv = prefill(%cached.joined) @p {request=r, start=64, end=100}\n"
        "%moved.2 = transfer(%cached.joined) @p {request=r, start=0, end=64, target=d, transport=tiers}\n"
        "%moved = transfer(%kv) @p {request=r, start=64, end=100, target=d, transport=tiers}\n"
        "evict(%cached.joined, %kv) @p {request=r, reason=handed_over}\n"
        "%answer, %tail = decode(%moved.2, %moved) @d {request=r, start=100, max_tokens=8}\n"
        "results %answer, %tail\n"
    )


def test_what_is_expected_back_soon_is_pinned_and_what_is_not_is_let_go_of() -> None:
    asked = [request("soon", reuse_s=60.0), request("late", reuse_s=4000.0), request("unknown")]
    text = made(asked, LifetimeAwarePass())
    assert "pin(%kv0, %tail0) @d {request=soon, ttl_s=60.0}\n" in text
    assert "evict(%kv1, %tail1) @d {request=late, reason=no_reuse}\n" in text
    assert text.endswith("results %answer0, %tail0, %answer1, %answer2, %tail2\n")
    assert text.count("pin(") == text.count("evict(") == 1


def test_where_memory_is_short_the_less_important_request_leaves_and_comes_back() -> None:
    text = (
        "%low = prefill @d {request=low, start=0, end=100}\n"
        "%high = prefill @d {request=high, start=0, end=100}\n"
        "%answer1, %tail1 = decode(%high) @d {request=high, start=100, max_tokens=8}\n"
        "%answer0, %tail0 = decode(%low) @d {request=low, start=100, max_tokens=8}\n"
        "results %answer0, %tail0, %answer1, %tail1\n"
    )
    asked = [request("low", priority=-1), request("high", priority=1)]
    kept = {
        CacheTier.DDR: (", keep=DDR", "load @d {request=low, start=0, end=100, tier=DDR}"),
        None: ("", "prefill @d {request=low, start=0, end=100}"),
    }
    for spill, (keep, back) in kept.items():
        limits = DeviceLimits(capacity_tokens=150, spill=spill)
        graph = parse(text).optimize(IROptimizer([MemoryAwarePreemptionPass()], PassContext.of(asked, d=limits)))
        assert render(graph) == (
            "%low = prefill @d {request=low, start=0, end=100}\n"
            f"evict(%low) @d {{request=low, reason=room{keep}}}\n"
            "%high = prefill @d {request=high, start=0, end=100}\n"
            "%answer1, %tail1 = decode(%high) @d {request=high, start=100, max_tokens=8}\n"
            "evict(%tail1) @d {request=high, reason=room}\n"
            "evict(%high) @d {request=high, reason=room}\n"
            f"%low.1 = {back}\n"
            "%answer0, %tail0 = decode(%low.1) @d {request=low, start=100, max_tokens=8}\n"
            "results %answer0, %tail0, %answer1\n"
        )


def test_a_piece_that_arrived_before_what_precedes_it_can_leave_and_come_back() -> None:
    text = (
        "%kv = prefill @p {request=r, start=0, end=100}\n"
        "%moved = transfer(%kv) @p {request=r, start=40, end=100, target=d, transport=tiers}\n"
        "%other = prefill @d {request=s, start=0, end=100}\n"
        "%x, %y = decode(%other) @d {request=s, start=100, max_tokens=8}\n"
        "%cached = load @d {request=r, start=0, end=40, tier=DDR}\n"
        "%answer, %tail = decode(%cached, %moved) @d {request=r, start=100, max_tokens=8}\n"
        "results %answer, %tail, %x, %y\n"
    )
    run = CachedRun(device=D, tier=CacheTier.DDR, end=40)
    asked = [request(cached=(run,), placement=ELSEWHERE), request("s")]
    context = PassContext.of(asked, d=DeviceLimits(capacity_tokens=110))
    graph = MemoryAwarePreemptionPass().run(parse(text), context).graph
    assert "evict(%moved) @d {request=r, reason=room}\n" in render(graph)
    assert "%moved.1 = prefill(%cached) @d {request=r, start=40, end=100}\n" in render(graph)
    assert interpret(graph, asked, context.devices).answers == interpret(parse(text), asked).answers


def test_a_request_that_cannot_fit_is_an_error_that_says_by_how_much() -> None:
    with pytest.raises(IRError, match="decode %answer, %tail: needs 108 tokens on d at once; its capacity is 107"):
        made([request()], MemoryAwarePreemptionPass(), d=DeviceLimits(capacity_tokens=107))
    assert made([request()], MemoryAwarePreemptionPass(), d=DeviceLimits(capacity_tokens=108)) == made([request()])


def test_what_was_to_be_kept_yields_when_nothing_else_can() -> None:
    asked = [request("a", reuse_s=60.0), request("b")]
    text = made(asked, LifetimeAwarePass(), MemoryAwarePreemptionPass(), d=DeviceLimits(capacity_tokens=110))
    assert "pin(" not in text
    assert "evict(%kv0) @d {request=a, reason=room}\n" in text


def test_the_pass_manager_says_what_each_pass_did() -> None:
    asked = [request(cached=(CachedRun(device=D, tier=CacheTier.HBM, end=64),))]
    optimized = IROptimizer(all_passes(), PassContext.of(asked)).run(IRBuilder().build(asked))
    assert [(each.name, each.changed) for each in optimized.reports if each.changed] == [
        ("prefix_cache_aware", True),
        ("batching_efficiency", True),
    ]
    assert optimized.reports[0].notes == ("r @d: 64 tokens are cached, 0 computed for another, 36 left",)


def test_a_pass_that_changes_who_is_answered_is_refused() -> None:
    class Forgetful:
        name = "forgetful"

        def run(self, graph: IRGraph, context: PassContext) -> Rewritten:
            del context
            return Rewritten(graph=IRGraph(graph.nodes[:1], graph.nodes[0].outputs))

    with pytest.raises(IRError, match="pass forgetful: its graph doesn't answer the same requests"):
        made([request()], Forgetful())


def test_a_request_that_the_context_does_not_know_is_named() -> None:
    optimizer = IROptimizer([PrefixCacheAwarePass()], PassContext.of([]))
    with pytest.raises(IRError, match="request 'r' is in the graph and not in the context"):
        IRBuilder().build([request()]).optimize(optimizer)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            (
                "%a = prefill @d {request=r, start=0, end=50}\n"
                "%x, %y = decode(%a) @d {request=r, start=100, max_tokens=8}\nresults %x, %y\n"
            ),
            r"its pieces cover \[0, 50\); it needs \[0, 100\)",
        ),
        (
            (
                "%a = prefill @p {request=r, start=0, end=100}\n"
                "%x, %y = decode(%a) @d {request=r, start=100, max_tokens=8}\nresults %x, %y\n"
            ),
            "%a lies on p, not on d",
        ),
        (
            "%a = load @d {request=r, start=0, end=4, tier=DDR}\nresults %a\n",
            "token 0 of r is not in DDR of d",
        ),
        (
            "%a = prefill @d {request=r, start=0, end=200}\nresults %a\n",
            "its request's prompt ends at 100",
        ),
        (
            (
                "%a = prefill @d {request=r, start=0, end=100}\n"
                "%x, %y = decode(%a) @d {request=r, start=100, max_tokens=9}\nresults %x, %y\n"
            ),
            "max_tokens 9; its request has 100 and 8",
        ),
        (
            (
                "%a = prefill @d {request=r, start=0, end=10}\npin(%a) @d {request=r, ttl_s=1.0}\n"
                "evict(%a) @d {request=r, reason=done}\nresults\n"
            ),
            "%a is pinned",
        ),
        ("%a = prefill @d {request=s, start=0, end=10}\nresults %a\n", "there is no request 's'"),
        (
            (
                "%a = prefill @d {request=r, start=0, end=10}\n"
                "%b = transfer(%a) @d {request=r, start=0, end=20, target=p, transport=tiers}\nresults %b\n"
            ),
            r"%a has tokens \[0, 10\) of r, not \[0, 20\) of r",
        ),
        (
            (
                "%a = prefill @d {request=r, start=0, end=10}\n%b = prefill(%a) @d {request=r, start=10, end=30}\n"
                "%c = join(%b, %a) @d {request=r}\nresults %c\n"
            ),
            "pieces follow each other",
        ),
    ],
)
def test_the_interpreter_refuses_what_cannot_be_carried_out(text: str, message: str) -> None:
    with pytest.raises(IRError, match=message):
        interpret(parse(text), [request()])


def test_batches_that_wait_for_each_other_or_are_too_large_are_refused() -> None:
    text = (
        "%a = prefill @d {request=r, start=0, end=10, batch=1}\n"
        "%b = prefill(%a) @d {request=r, start=10, end=20, batch=2}\n"
        "%c = prefill(%a, %b) @d {request=r, start=20, end=30, batch=1}\n"
        "results %c\n"
    )
    with pytest.raises(IRError, match="prefill %c: prefill batch 1 on d depends on itself"):
        check_batches(parse(text), {})
    one = parse("%a = prefill @d {request=r, start=0, end=10, batch=1}\nresults %a\n")
    with pytest.raises(IRError, match="has 10 tokens; at most 9"):
        check_batches(one, {D: DeviceLimits(prefill_batch_tokens=9)})
