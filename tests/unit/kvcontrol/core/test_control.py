"""A snapshot says what is held, in which tier, and what comes before each block."""

import msgspec

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
    assert arrived.hashes(CacheTier.HBM) == [ONE, TWO]
    assert arrived.hashes(CacheTier.DDR) == []
    assert arrived.seq == 7
