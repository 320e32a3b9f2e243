"""What operators ask of an engine's tiers: done between two steps, or refused with what is wrong and allowed."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engines.control.calls import EngineBusyError
from engines.control.errors import RefusedError
from engines.control.operations import BLOCKS, MIGRATE, QUOTAS, RESET, SET_QUOTA
from engines.control.tiers import TierControl
from engines.lmdeploy.engine_calls import EngineCalls
from engines.lmdeploy.offload.tiers import EngineTiers
from engines.lmdeploy.trie.pins import TriePins
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.tenant import tenant_of_salt
from kvcontrol.kv_runtime import TenantQuota
from tests.support.tiers import BLOCK_BYTES, Rig, path

DDR, NVME = CacheTier.DDR, CacheTier.NVME
NAME = "0" * 32
HBM_BLOCKS = 5
"""What the stand-in for LMDeploy's prefix cache gives up."""

Ask = Callable[[bytes, object], Any]


class Loop:
    """An engine's loop: a thread of its own, on which operations run."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(20)
        self.loop.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(ddr=8, nvme=16)
    yield made
    made.hierarchy.check_integrity()
    made.close()


SOMEBODY = tenant_of_salt("somebody's salt")


def operations_of(rig: Rig | None, loop: Loop) -> TierControl:
    trie = SimpleNamespace(evict=lambda _: HBM_BLOCKS, block_size=16, allocator=None)
    tiers = None
    if rig is not None:
        tiers = EngineTiers(pages_per_block=1, deadline_s=1.0)
        tiers.hierarchy = rig.hierarchy
    calls = EngineCalls()
    calls.attach(loop.loop)
    pins = TriePins(SimpleNamespace(block_trie=trie), tiers, share=0.5, longest_tokens=16)
    return TierControl(
        lambda: None if tiers is None else tiers.hierarchy,
        calls,
        reset=pins.reset,
        remedy="start it with KVGATE_ENGINE_DDR_BYTES set",
    )


def asking(operations: TierControl) -> Ask:
    def ask(operation: bytes, body: object = b"") -> Any:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return json.loads(operations.table()[operation](raw))

    return ask


@pytest.fixture
def ask(rig: Rig, loop: Loop) -> Ask:
    return asking(operations_of(rig, loop))


def test_blocks_are_listed_those_used_last_first(rig: Rig, ask: Ask) -> None:
    rig.save(path([1, 2], tenant="a"))
    rig.clock.pass_by(5)
    rig.save(path([3], tenant="b"))
    rig.run()
    listed = ask(BLOCKS, b"")
    assert listed["total"] == 3
    assert listed["blocks"][0] == {
        "hash": (3).to_bytes(16, "little").hex(),
        "tiers": ["DDR", "NVME"],
        "size_bytes": BLOCK_BYTES,
        "tenant": "b",
        "idle_s": pytest.approx(listed["blocks"][0]["idle_s"]),
    }
    assert ask(BLOCKS, {"tenant": "a", "limit": 1})["total"] == 2
    assert len(ask(BLOCKS, {"tenant": "a", "limit": 1})["blocks"]) == 1
    assert ask(BLOCKS, {"tier": "NVME"})["total"] == 3
    assert ask(BLOCKS, {"tier": "REMOTE"}) == {"total": 0, "blocks": []}


def test_blocks_are_moved_both_ways_each_once_and_unknown_ones_are_named(rig: Rig, ask: Ask) -> None:
    records = path([1, 2, 3])
    rig.save(records)
    rig.run()
    rig.save(path(range(100, 108)))
    rig.run()
    assert {rig.tiers(one) for one in records} == {"NVME"}
    names = [one.key.hex() for one in records]
    answer = ask(MIGRATE, {"hashes": [*names, names[0].upper(), "f" * 32], "tier": "DDR"})
    assert answer == {"started": 3, "unknown": ["f" * 32]}
    rig.run()
    assert {rig.tiers(one) for one in records} == {"DDR NVME"}
    assert ask(MIGRATE, {"hashes": names, "tier": "NVME"}) == {"started": 3, "unknown": []}
    rig.run()
    assert {rig.tiers(one) for one in records} == {"DDR NVME"}
    assert ask(MIGRATE, {"hashes": ["f" * 32], "tier": "NVME"}) == {"started": 0, "unknown": ["f" * 32]}


def test_quotas_are_set_and_taken_back(rig: Rig, ask: Ask) -> None:
    quota = {"guaranteed_bytes": 2 * BLOCK_BYTES, "burst_bytes": 4 * BLOCK_BYTES, "weight": 2.0}
    assert (
        ask(SET_QUOTA, {"tenant": SOMEBODY, "tier": "DDR", "quota": quota})["tiers"]["DDR"][SOMEBODY]["quota"] == quota
    )
    assert rig.quotas.get(SOMEBODY, DDR) == TenantQuota(**quota)  # type: ignore[arg-type]
    assert ask(QUOTAS)["tiers"]["NVME"] == {}
    assert ask(SET_QUOTA, {"tenant": SOMEBODY, "tier": "DDR", "quota": {}})["tiers"]["DDR"][SOMEBODY]["quota"] == {
        "guaranteed_bytes": 0,
        "burst_bytes": None,
        "weight": 1.0,
    }
    assert ask(SET_QUOTA, {"tenant": SOMEBODY, "tier": "DDR", "quota": None})["tiers"]["DDR"] == {}


def test_a_reset_forgets_everything_and_counts_it_by_tier(rig: Rig, ask: Ask) -> None:
    rig.save(path([1, 2, 3]))
    rig.run()
    assert ask(RESET) == {"dropped": {"HBM": HBM_BLOCKS, "DDR": 3, "NVME": 3}}
    assert ask(BLOCKS)["total"] == 0
    assert ask(RESET, b"anything") == {"dropped": {"HBM": HBM_BLOCKS, "DDR": 0, "NVME": 0}}


BAD_BLOCKS: list[tuple[object, str]] = [
    (b"[]", "Expected `object`, got `array`"),
    ({"limit": 0}, ">= 1"),
    ({"limit": 10_001}, "<= 10000"),
    ({"limit": "many"}, "got `str` - at `$.limit`"),
    ({"limit": 1.5}, "got `float` - at `$.limit`"),
    ({"tier": "TAPE"}, "'TAPE' - at `$.tier`"),
    ({"tier": 3}, "at `$.tier`"),
    ({"tenant": 3}, "at `$.tenant`"),
    ({"teir": "DDR"}, "unknown field `teir`"),
]
BAD_MIGRATIONS: list[tuple[object, str]] = [
    (b"", "missing required field `hashes`"),
    (b"{", "truncated"),
    (b'\xff{"hashes"', "malformed"),
    (b'{"hashes": ["\xff"], "tier": "DDR"}', "utf-8"),
    ({"hashes": [NAME]}, "missing required field `tier`"),
    ({"hashes": NAME, "tier": "DDR"}, "got `str` - at `$.hashes`"),
    ({"hashes": [1], "tier": "DDR"}, "got `int` - at `$.hashes[0]`"),
    ({"hashes": [], "tier": "DDR"}, "length >= 1"),
    ({"hashes": [NAME] * 10_001, "tier": "DDR"}, "length <= 10000"),
    ({"hashes": [NAME], "tier": None}, "at `$.tier`"),
    ({"hashes": [NAME], "tier": "TAPE"}, "'TAPE'"),
    ({"hashes": [NAME], "tier": "DDR", "force": True}, "unknown field `force`"),
]
BAD_QUOTAS: list[tuple[object, str]] = [
    (b"null", "got `null`"),
    ({"tier": "DDR", "quota": None}, "missing required field `tenant`"),
    ({"tenant": SOMEBODY, "quota": None}, "missing required field `tier`"),
    ({"tenant": SOMEBODY, "tier": "DDR"}, "missing required field `quota`"),
    ({"tenant": "", "tier": "DDR", "quota": None}, "16 hex digits"),
    ({"tenant": "acme", "tier": "DDR", "quota": None}, "16 hex digits"),
    ({"tenant": SOMEBODY.upper(), "tier": "DDR", "quota": None}, "at `$.tenant`"),
    ({"tenant": SOMEBODY + "\n", "tier": "DDR", "quota": None}, "at `$.tenant`"),
    ({"tenant": 7, "tier": "DDR", "quota": None}, "at `$.tenant`"),
    ({"tenant": SOMEBODY, "tier": "TAPE", "quota": None}, "'TAPE'"),
    ({"tenant": SOMEBODY, "tier": "DDR", "quota": []}, "at `$.quota`"),
    ({"tenant": SOMEBODY, "tier": "DDR", "quota": {"weigth": 1}}, "unknown field `weigth`"),
    ({"tenant": SOMEBODY, "tier": "DDR", "quota": {"guaranteed_bytes": -1}}, ">= 0"),
    ({"tenant": SOMEBODY, "tier": "DDR", "quota": {"guaranteed_bytes": 1 << 63}}, "<= 9223372036854775807"),
    ({"tenant": SOMEBODY, "tier": "DDR", "quota": {"guaranteed_bytes": "1GiB"}}, "at `$.quota.guaranteed_bytes`"),
    ({"tenant": SOMEBODY, "tier": "DDR", "quota": {"burst_bytes": -1}}, ">= 0"),
    ({"tenant": SOMEBODY, "tier": "DDR", "quota": {"burst_bytes": 1.5}}, "at `$.quota.burst_bytes`"),
    ({"tenant": SOMEBODY, "tier": "DDR", "quota": {"weight": 0}}, "> 0"),
    ({"tenant": SOMEBODY, "tier": "DDR", "quota": {"weight": None}}, "at `$.quota.weight`"),
    (b'{"tenant": SOMEBODY, "tier": "DDR", "quota": {"weight": NaN}}', "malformed"),
]
REFUSED: list[tuple[bytes, object, str, str]] = [
    *((BLOCKS, body, why, "allowed: limit (1 to 10000), tier (DDR or NVME) and tenant") for body, why in BAD_BLOCKS),
    *((MIGRATE, body, why, "allowed: hashes (1 to 10000 names of blocks") for body, why in BAD_MIGRATIONS),
    *(
        (SET_QUOTA, body, why, "allowed: tenant (shared, or a digest of a salt: 16 hex digits), tier")
        for body, why in BAD_QUOTAS
    ),
    (MIGRATE, {"hashes": [NAME, "zz"], "tier": "DDR"}, "'zz' is no name of a block", "it is 32 hex digits"),
    (MIGRATE, {"hashes": ["00"], "tier": "DDR"}, "'00' is no name of a block", "it is 32 hex digits"),
    (MIGRATE, {"hashes": [" ".join(["00"] * 16)], "tier": "DDR"}, "is no name of a block", "it is 32 hex digits"),
    (MIGRATE, {"hashes": [NAME], "tier": "HBM"}, "no HBM tier", "it has DDR, NVME"),
    (SET_QUOTA, {"tenant": SOMEBODY, "tier": "REMOTE", "quota": None}, "no REMOTE tier", "it has DDR, NVME"),
    (
        SET_QUOTA,
        {"tenant": SOMEBODY, "tier": "DDR", "quota": {"guaranteed_bytes": 20, "burst_bytes": 10}},
        "burst_bytes is 10",
        "must be >= guaranteed_bytes (20)",
    ),
    (
        SET_QUOTA,
        {"tenant": SOMEBODY, "tier": "DDR", "quota": {"guaranteed_bytes": 9 * BLOCK_BYTES}},
        "guarantees in DDR add up to 9 blocks",
        "it has 8",
    ),
    (SET_QUOTA, b'{"tenant": "shared", "tier": "DDR", "quota": {"weight": 1e999}}', "weight", "a"),
]


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_done_is_refused_with_what_is_wrong_and_what_is_allowed(
    rig: Rig, ask: Ask, case: tuple[bytes, object, str, str]
) -> None:
    operation, body, why, allowed = case
    rig.save(path([1, 2, 3]))
    before = (ask(QUOTAS), ask(BLOCKS)["total"])
    with pytest.raises(RefusedError) as caught:
        ask(operation, body)
    assert why in str(caught.value)
    assert allowed in str(caught.value)
    assert (ask(QUOTAS), ask(BLOCKS)["total"]) == before


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        (BLOCKS, {}),
        (MIGRATE, {"hashes": [NAME], "tier": "DDR"}),
        (QUOTAS, {}),
        (SET_QUOTA, {"tenant": SOMEBODY, "tier": "DDR", "quota": None}),
    ],
)
def test_an_engine_without_tiers_says_how_to_get_them_and_knows_the_reset(
    loop: Loop, operation: bytes, body: object
) -> None:
    ask = asking(operations_of(None, loop))
    with pytest.raises(RefusedError, match="no tiers below HBM; start it with KVGATE_ENGINE_DDR_BYTES"):
        ask(operation, body)
    assert ask(RESET, b"") == {"dropped": {"HBM": HBM_BLOCKS}}


def test_an_engine_that_does_not_get_to_it_is_busy(rig: Rig) -> None:
    operations = operations_of(rig, stopped := Loop())
    stopped.close()
    for operation, body in ((BLOCKS, b""), (RESET, b""), (MIGRATE, {"hashes": [NAME], "tier": "DDR"})):
        with pytest.raises(EngineBusyError):
            asking(operations)(operation, body)
