from dataclasses import replace

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.scheduler_ir import (
    DecodeConfig,
    Device,
    EvictConfig,
    IRBuilder,
    IRError,
    IRGraph,
    IRNode,
    IRRequest,
    JoinConfig,
    LoadConfig,
    NodeType,
    Placement,
    PrefillConfig,
    ValueName,
)

A = Device("a")


def names(*values: str) -> tuple[ValueName, ...]:
    return tuple(ValueName(each) for each in values)


def prefill(output: str, *inputs: str, start: int = 0, end: int = 8) -> IRNode:
    config = PrefillConfig(request="r", start=start, end=end)
    return IRNode(node_type=NodeType.PREFILL, inputs=names(*inputs), outputs=names(output), config=config, device=A)


def decode(answer: str, *inputs: str) -> IRNode:
    return IRNode(
        node_type=NodeType.DECODE,
        inputs=names(*inputs),
        outputs=names(answer, answer + "_tail"),
        config=DecodeConfig(request="r", start=8, max_tokens=4),
        device=A,
    )


def evict(*inputs: str) -> IRNode:
    config = EvictConfig(request="r")
    return IRNode(node_type=NodeType.EVICT, inputs=names(*inputs), outputs=(), config=config, device=A)


def join(output: str, *inputs: str) -> IRNode:
    config = JoinConfig(request="r")
    return IRNode(node_type=NodeType.JOIN, inputs=names(*inputs), outputs=names(output), config=config, device=A)


def test_a_graph_is_in_topological_order_whatever_the_order_of_its_nodes() -> None:
    graph = IRGraph(
        [decode("answer", "b"), prefill("b", "a", start=4), prefill("a", end=4)], names("answer", "answer_tail")
    )
    assert [node.describe() for node in graph] == ["prefill %a", "prefill %b", "decode %answer, %answer_tail"]


def test_free_nodes_keep_their_order() -> None:
    nodes = [prefill("z"), prefill("m"), prefill("a")]
    graph = IRGraph(nodes, names("z", "m", "a"))
    assert graph.topological_order() == tuple(nodes)


def test_a_node_that_uses_a_value_up_comes_after_all_others_that_take_it() -> None:
    graph = IRGraph([prefill("a"), evict("a"), decode("answer", "a")], names("answer", "answer_tail"))
    assert [node.node_type for node in graph] == [NodeType.PREFILL, NodeType.DECODE, NodeType.EVICT]


@pytest.mark.parametrize(
    ("nodes", "results", "message"),
    [
        ([prefill("a"), prefill("a")], ["a"], "%a is given twice, by prefill %a and by prefill %a"),
        ([decode("x", "a")], ["x", "x_tail"], "decode %x, %x_tail takes %a, which no node gives"),
        ([prefill("a")], [], "%a dangles: prefill %a gives it, nothing takes it and it is no result"),
        ([prefill("a")], ["a", "b"], "results: %b is given by no node"),
        ([prefill("a")], ["a", "a"], "results: a value is named twice"),
        ([prefill("a"), evict("a")], ["a"], r"%a is a result and used up by evict\(%a\)"),
        ([prefill("a"), evict("a"), evict("a")], [], "%a is used up twice"),
        ([prefill("a"), decode("x", "a", "a")], ["x", "x_tail"], "decode %x, %x_tail: it takes a value twice"),
        (
            [prefill("a", "c"), prefill("b", "a"), prefill("c", "b"), prefill("d", "c")],
            ["d"],
            "^a cycle: prefill %a -> prefill %b -> prefill %c -> prefill %a$",
        ),
        ([prefill("a", "a")], ["a"], "^a cycle: prefill %a -> prefill %a$"),
        # using up what one itself leads to: the join waits for the prefill that takes what it gives
        (
            [prefill("a"), prefill("b"), join("c", "a", "b"), prefill("d", "c", "a")],
            ["d"],
            "a cycle: join %c -> prefill %d -> join %c",
        ),
    ],
)
def test_a_graph_that_cannot_be_is_refused_with_what_is_wrong(
    nodes: list[IRNode], results: list[str], message: str
) -> None:
    with pytest.raises(IRError, match=message):
        IRGraph(nodes, names(*results))


def test_a_cycle_of_many_nodes_is_named_by_its_ends_and_how_many_are_between() -> None:
    count = 20_000
    nodes = [prefill(f"v{number}", f"v{(number - 1) % count}") for number in range(count)]
    with pytest.raises(IRError) as caught:
        IRGraph(nodes, ())
    said = str(caught.value)
    assert said.startswith("a cycle: prefill %v0 -> prefill %v1 -> ")
    assert " -> (19985 more) -> " in said
    assert said.endswith("prefill %v19999 -> prefill %v0")
    assert len(said) < 500


def test_a_node_of_many_values_is_named_by_the_first() -> None:
    assert evict(*(f"v{number}" for number in range(1_000))).describe().endswith("%v7 and 992 more)")


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            replace(prefill("a"), config=EvictConfig(request="r")),
            "its config is a EvictConfig; it must be a PrefillConfig",
        ),
        (replace(prefill("a"), outputs=()), "it gives 0 values; it must give 1"),
        (replace(prefill("a"), device=Device("")), "its device is empty"),
        (prefill("a", start=8, end=8), r"tokens \[8, 8\) are none"),
        (replace(prefill("a"), config=PrefillConfig(request="", start=0, end=1)), "its request is empty"),
        (join("a", "b"), "it takes 1 values; it must take 2 or more"),
        (
            replace(evict("a"), config=EvictConfig(request="r", keep=CacheTier.HBM)),
            "keep is HBM, the evicted tier",
        ),
        (
            IRNode(
                node_type=NodeType.LOAD,
                inputs=names("b", "c"),
                outputs=names("a"),
                config=LoadConfig(request="r", start=0, end=4),
                device=A,
            ),
            "it takes 2 values; it must take 0 to 1",
        ),
    ],
)
def test_a_node_that_cannot_be_is_refused(node: IRNode, message: str) -> None:
    with pytest.raises(IRError, match=message):
        IRGraph([node], ())


def test_graphs_of_equal_nodes_are_equal() -> None:
    one = IRGraph([prefill("a"), decode("x", "a")], names("x", "x_tail"))
    assert one == IRGraph(one.nodes, one.results)
    assert hash(one) == hash(IRGraph(one.nodes, one.results))
    assert one != IRGraph([decode("y", "b"), prefill("b")], names("y_tail", "y"))


def test_a_request_that_is_named_twice_is_refused() -> None:
    request = IRRequest(request_id="r", prompt_tokens=8, max_tokens=4, placement=Placement(answer=A))
    with pytest.raises(IRError, match="a request is named twice"):
        IRBuilder().build([request, request])


def test_who_gives_and_who_takes_a_value_can_be_asked() -> None:
    graph = IRGraph([prefill("a"), decode("x", "a"), evict("a")], names("x", "x_tail"))
    assert graph.giver(ValueName("a")) is graph.nodes[0]
    assert graph.takers(ValueName("a")) == graph.nodes[1:]
    assert graph.request_ids == ("r",)
    with pytest.raises(IRError, match="no node gives %b"):
        graph.giver(ValueName("b"))
