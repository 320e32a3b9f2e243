"""A snapshot says what is held, in which tier, and what comes before each block."""

import msgspec
import pytest

from kvcontrol.core import BlockHash, CacheIdentity, CacheTier, Epoch, Seq
from kvcontrol.core.control import Residents, Snapshot

IDENTITY = CacheIdentity(model="m", revision="r", kv_dtype="float32", block_size_tokens=16)
ONE, TWO, GONE = (BlockHash(bytes([n]) * 16) for n in range(3))
RESIDENTS: Residents = {CacheTier.HBM: [(ONE, None), (TWO, ONE)], CacheTier.NVME: [(TWO, GONE)]}


def snapshot(residents: Residents = RESIDENTS) -> Snapshot:
    return Snapshot.of(epoch=Epoch("e"), seq=Seq(7), identity=IDENTITY, residents=residents)


def test_what_is_sent_is_what_arrives() -> None:
    arrived = msgspec.json.decode(msgspec.json.encode(snapshot()), type=Snapshot)
    assert arrived == snapshot()
    assert arrived.residents() == RESIDENTS
    assert arrived.hashes(CacheTier.HBM) == [ONE, TWO]
    assert arrived.hashes(CacheTier.DDR) == []
    assert arrived.last_seq == 7


@pytest.mark.parametrize(
    ("tiers", "parents"),
    [
        ({CacheTier.HBM: ["zz"]}, {CacheTier.HBM: [""]}),
        ({CacheTier.HBM: ["00"]}, {CacheTier.HBM: []}),
        ({CacheTier.HBM: ["00"]}, {}),
    ],
    ids=["not hex", "a parent too few", "no parents"],
)
def test_a_broken_snapshot_is_refused(tiers: dict[CacheTier, list[str]], parents: dict[CacheTier, list[str]]) -> None:
    broken = Snapshot(epoch=Epoch("e"), seq=0, identity=IDENTITY, tiers=tiers, parents=parents)
    with pytest.raises(ValueError, match=r".+"):
        broken.residents()
