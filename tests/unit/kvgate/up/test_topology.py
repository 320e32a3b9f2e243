import pytest

from kvcontrol.core.roles import EngineRole, KVTransport
from kvgate.failure import CommandError
from kvgate.up.stack import chosen_transport
from kvgate.up.topology import ALL_HYBRID, Topology

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
    with pytest.raises(CommandError, match="--topology has 2 instances, --instances is 3"):
        pair.count(3, 5)


def test_prompts_go_through_tiers_where_there_are_any() -> None:
    pair = Topology.parse("pd")
    assert chosen_transport(pair, None, on_gpu=False, tiers=False) is KVTransport.MIGRATION
    assert chosen_transport(pair, None, on_gpu=True, tiers=True) is KVTransport.TIERS
    assert chosen_transport(ALL_HYBRID, None, on_gpu=True, tiers=True) is None


@pytest.mark.parametrize(
    ("topology", "asked", "on_gpu", "tiers", "why"),
    [
        ("pd", None, True, False, "on CPUs alone"),
        ("pd", KVTransport.MIGRATION, False, True, "cannot be combined"),
        ("pd", KVTransport.TIERS, False, False, "there are none"),
        ("hybrid", KVTransport.TIERS, False, True, "there are none"),
    ],
)
def test_what_can_not_be_is_refused(
    topology: str, asked: KVTransport | None, why: str, *, on_gpu: bool, tiers: bool
) -> None:
    with pytest.raises(CommandError, match=why):
        chosen_transport(Topology.parse(topology), asked, on_gpu=on_gpu, tiers=tiers)
