import pytest

from kvcontrol.core.roles import EngineRole
from kvgate.failure import CommandError
from kvgate.stack import need_possible_topology
from kvgate.topology import ALL_HYBRID, Topology

P, D = EngineRole.PREFILL, EngineRole.DECODE


@pytest.mark.parametrize(
    ("text", "roles"),
    [("hybrid", ()), ("pd", (P, D)), ("1p1d", (P, D)), ("1P2D", (P, D, D)), ("2p1d", (P, P, D))],
)
def test_names_are_roles(text: str, roles: tuple[EngineRole, ...]) -> None:
    assert Topology.parse(text).roles == roles


@pytest.mark.parametrize("text", ["", "dp", "0p1d", "1p0d", "1p", "p1d", "100p1d", "1p1d "])
def test_an_unknown_name_is_answered_with_the_known_ones(text: str) -> None:
    with pytest.raises(CommandError) as refused:
        Topology.parse(text)
    assert "1p2d" in str(refused.value) + str(refused.value.__dict__)


def test_the_topology_says_how_many_instances_there_are() -> None:
    pair = Topology.parse("pd")
    assert pair.count(None, 5) == pair.count(2, 5) == 2
    assert (ALL_HYBRID.count(None, 5), ALL_HYBRID.count(3, 5)) == (5, 3)
    assert ALL_HYBRID.role(7) is EngineRole.HYBRID
    with pytest.raises(CommandError, match="--topology has 2 instances, --instances says 3"):
        pair.count(3, 5)


def test_what_can_not_be_is_refused() -> None:
    pair = Topology.parse("pd")
    need_possible_topology(pair, on_gpu=False, tiers=False)
    need_possible_topology(ALL_HYBRID, on_gpu=True, tiers=True)
    with pytest.raises(CommandError, match="is for CPUs"):
        need_possible_topology(pair, on_gpu=True, tiers=False)
    with pytest.raises(CommandError, match="are not combined"):
        need_possible_topology(pair, on_gpu=False, tiers=True)
