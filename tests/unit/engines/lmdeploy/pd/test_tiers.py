"""Blocks go from one instance's tiers to another's over a real socket: both sides, and every way to get it wrong."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace

import pytest

from engines.lmdeploy.engine_calls import EngineCalls
from engines.lmdeploy.offload.plan import SupplyPath
from engines.lmdeploy.offload.tiers import EngineTiers
from engines.lmdeploy.pd.block_wire import BlockOffer, Wanted, ask, offer_blocks, read_wanted, refuse, take
from engines.lmdeploy.pd.borrower import PdBorrower
from engines.lmdeploy.pd.lender import PdLender
from engines.lmdeploy.pd.networks import LOOPBACK, parse_networks
from engines.lmdeploy.pd.peers import Peers
from engines.lmdeploy.pd.server import PdServer
from engines.lmdeploy.pd.wire import Connection, TransferError
from kvcontrol.core.hashing import token_bytes
from kvcontrol.core.ids import BlockHash
from kvcontrol.core.pd import Load
from kvcontrol.kv_runtime import BlockRecord, SaveRequest, checksum
from kvcontrol.prefix_reuse import PromptChain
from tests.support.memory_tier import MemoryDisk
from tests.support.tiers import BLOCK_BYTES, Rig

SIZE = 4
ROOT = BlockHash(b"r" * 16)
LAYOUT = "layout"
LIMIT_S = 30.0


def chain_of(blocks: int, *, first_token: int = 0) -> PromptChain:
    tokens = token_bytes(range(first_token, first_token + blocks * SIZE))
    width = len(tokens) // (blocks * SIZE)
    chain = PromptChain(ROOT, block_size_tokens=SIZE, source=lambda first, last: tokens[first * width : last * width])
    chain.grow(blocks)
    return chain


def records_of(chain: PromptChain) -> list[BlockRecord]:
    places = range(len(chain.keys))
    return [BlockRecord(chain.keys[each], chain.parent(each), chain.tokens(each), "tenant") for each in places]


def tiers_of(rig: Rig) -> EngineTiers:
    tiers = EngineTiers(pages_per_block=1, deadline_s=LIMIT_S)
    tiers.hierarchy, tiers.arena = rig.hierarchy, rig.arena
    return tiers


class World:
    """Two instances' tiers; ``other`` has the blocks. Both are of the test's own loop."""

    def __init__(self, *, ddr: int = 8) -> None:
        self.mine, self.other = Rig(ddr=ddr, nvme=0), Rig(ddr=8, nvme=16)
        self.calls = EngineCalls()
        self.calls.attach(asyncio.get_running_loop())
        self.lender = PdLender(tiers_of(self.other), self.calls, layout=LAYOUT, wait_s=LIMIT_S)
        self.doors: list[PdServer] = []
        self.source = self.door(self.lender.serve)
        self.borrower = self.borrowing()

    def door(self, serve: Callable[[Connection], None]) -> Load:
        peers = Peers(parse_networks(LOOPBACK))
        self.doors.append(PdServer(serve, peers, host="127.0.0.1", port=0, timeout_s=LIMIT_S))
        self.doors[-1].start()
        return Load(host="127.0.0.1", port=self.doors[-1].port)

    def borrowing(self, *, layout: str = LAYOUT, timeout_s: float = LIMIT_S) -> PdBorrower:
        return PdBorrower(tiers_of(self.mine), Peers(parse_networks(LOOPBACK)), layout=layout, timeout_s=timeout_s)

    def sequence(self, request_id: int, source: Load | None = None) -> SimpleNamespace:
        param = SimpleNamespace(kvgate_pd=source or self.source)
        return SimpleNamespace(seq_id=request_id, sampling_param=param)

    async def bring(self, chain: PromptChain, *, request_id: int = 1, source: Load | None = None) -> None:
        """Ask until nothing is awaited any more."""
        seq, path = self.sequence(request_id, source), path_of(chain)
        assert self.borrower.is_for(seq)
        async with asyncio.timeout(LIMIT_S):
            while self.borrower.awaits(seq, path, 0):
                await asyncio.sleep(0.001)

    def there(self, chain: PromptChain) -> int:
        return len(self.mine.hierarchy.find_run(chain.keys, chain.block_tokens, 0, len(chain.keys)).block_ids)

    def bytes_of(self, chain: PromptChain, blocks: int) -> list[bytes]:
        lent = self.mine.hierarchy.exchange.lend(chain.keys[:blocks])
        try:
            return [bytes(self.mine.arena.view(each.slot)) for each in lent]
        finally:
            self.mine.hierarchy.exchange.back(lent)

    async def close(self) -> None:
        for request_id in range(10):
            self.borrower.forget(request_id)
        async with asyncio.timeout(LIMIT_S):
            while len(self.mine.hierarchy.exchange) or len(self.other.hierarchy.exchange):
                await asyncio.sleep(0.001)
        self.borrower.close()
        for door in self.doors:
            await asyncio.to_thread(door.close)
        for rig in (self.mine, self.other):
            rig.hierarchy.check_integrity()
            assert rig.hierarchy.held() == []
            rig.close()


def path_of(chain: PromptChain) -> SupplyPath:
    return SupplyPath(chain=chain, tenant="tenant", limit=len(chain.keys))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.close()


async def test_blocks_come_as_they_were_saved_and_stay_until_their_loads_are_planned(world: World) -> None:
    chain = chain_of(6)
    data = world.other.save(records_of(chain))
    await world.bring(chain)
    assert world.bytes_of(chain, 6) == data
    assert len(world.mine.hierarchy.held()) == 6
    seq = world.sequence(1)
    world.borrower.settled(seq)
    assert world.mine.hierarchy.held() == []
    assert seq.kvgate_borrowed_tokens == 6 * SIZE
    assert (world.borrower.fetched, world.borrower.fetched_bytes) == (1, 6 * BLOCK_BYTES)
    assert not world.borrower.recomputed


async def test_only_what_is_missing_is_brought(world: World) -> None:
    chain = chain_of(6)
    records = records_of(chain)
    world.other.save(records)
    world.mine.save(records[:4])
    await world.bring(chain)
    assert world.there(chain) == 6
    assert world.borrower.fetched_bytes == 2 * BLOCK_BYTES
    await world.bring(chain, request_id=2)
    assert world.borrower.fetched == 1


async def test_what_the_peer_has_only_in_part_is_brought_in_part(world: World) -> None:
    chain = chain_of(6)
    world.other.save(records_of(chain)[:3])
    await world.bring(chain)
    assert world.there(chain) == 3
    assert world.borrower.fetched == 1


async def test_blocks_that_are_still_being_saved_are_waited_for(world: World) -> None:
    chain = chain_of(4)
    world.other.fill(range(4))
    requests = [SaveRequest(record, slot) for slot, record in enumerate(records_of(chain))]
    world.other.hierarchy.save(requests)
    bringing = asyncio.create_task(world.bring(chain))
    await asyncio.sleep(0.05)
    assert not bringing.done()
    world.other.run()
    await bringing
    assert world.there(chain) == 4


async def test_blocks_that_went_to_nvme_are_brought_up_first(world: World) -> None:
    chain, others = chain_of(6), chain_of(8, first_token=1000)
    data = world.other.save(records_of(chain))
    world.other.run()
    world.other.save(records_of(others))
    assert world.other.tiers(records_of(chain)[0]) == "NVME"
    bringing = asyncio.create_task(world.bring(chain))
    async with asyncio.timeout(LIMIT_S):
        while not bringing.done():
            world.other.run()
            await asyncio.sleep(0.001)
    await bringing
    assert world.bytes_of(chain, 6) == data


async def test_requests_with_the_same_prompt_have_it_brought_once(world: World) -> None:
    chain = chain_of(5)
    world.other.save(records_of(chain))
    await asyncio.gather(*(world.bring(chain, request_id=each) for each in range(5)))
    assert world.there(chain) == 5
    assert world.borrower.fetched_bytes == 5 * BLOCK_BYTES
    assert not world.borrower.recomputed


async def test_a_changed_byte_is_found_and_what_came_before_it_is_used(world: World) -> None:
    chain = chain_of(5)
    world.other.save(records_of(chain))
    [lent] = world.other.hierarchy.exchange.lend(chain.keys[2:3])
    world.other.arena.view(lent.slot)[7] ^= 1
    world.other.hierarchy.exchange.back([lent])
    await world.bring(chain)
    assert world.there(chain) == 2
    assert world.borrower.recomputed == {"checksum": 1}
    assert world.borrower.fetched == 0


async def test_what_finds_no_room_is_computed() -> None:
    world = World(ddr=4)
    try:
        chain, mine = chain_of(6), chain_of(2, first_token=1000)
        world.other.save(records_of(chain))
        world.mine.save(records_of(mine))
        world.mine.hierarchy.claims.hold(world.mine.ids(records_of(mine)))
        await world.bring(chain)
        assert world.there(chain) == 2
        assert world.borrower.recomputed == {"no_room": 1}
        world.mine.hierarchy.claims.release(world.mine.ids(records_of(mine)))
    finally:
        await world.close()


async def test_a_peer_that_is_gone_or_refuses_costs_no_more_than_the_prompt(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    await world.bring(chain_of(3), request_id=1, source=Load(host="127.0.0.1", port=port))
    await world.bring(chain_of(3), request_id=2)
    await world.bring(chain_of(3), request_id=3, source=Load(host="192.0.2.1", port=9))
    assert world.borrower.recomputed == {"unreachable": 1, "refused": 1, "unlisted": 1}
    world.borrower = world.borrowing(layout="another")
    await world.bring(chain_of(3))
    assert world.borrower.recomputed == {"refused": 1}


def _other_tokens(connection: Connection) -> None:
    wanted = read_wanted(connection)
    count = len(wanted.keys)
    tokens = [token_bytes(range(90, 90 + SIZE))] * count
    offer_blocks(connection, BlockOffer(parents=[b"", *wanted.keys[:-1]], tokens=tokens, checksums=[0] * count))


def _too_many(connection: Connection) -> None:
    wanted = read_wanted(connection)
    count = len(wanted.keys) + 1
    offer_blocks(connection, BlockOffer(parents=[b""] * count, tokens=[b""] * count, checksums=[0] * count))


def _nonsense(connection: Connection) -> None:
    read_wanted(connection)
    connection.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def _no(connection: Connection) -> None:
    read_wanted(connection)
    refuse(connection, "no")


@pytest.mark.parametrize(
    ("serve", "cause"),
    [(_other_tokens, "tokens"), (_too_many, "protocol"), (_nonsense, "protocol"), (_no, "refused"), (None, "lost")],
)
async def test_a_peer_that_says_what_can_not_be_is_not_believed(
    world: World, serve: Callable[[Connection], None] | None, cause: str
) -> None:
    source = world.door(serve or (lambda connection: connection.close()))
    await world.bring(chain_of(4), source=source)
    assert world.borrower.recomputed == {cause: 1}
    assert world.there(chain_of(4)) == 0


async def test_a_peer_that_stops_in_the_middle_leaves_what_came(world: World) -> None:
    chain = chain_of(5)
    data = [bytes([each]) * BLOCK_BYTES for each in range(5)]

    def half(connection: Connection) -> None:
        read_wanted(connection)
        offer_blocks(connection, offer_of(chain, data))
        connection.send(data[0] + data[1] + data[2][:100])

    await world.bring(chain, source=world.door(half))
    assert world.bytes_of(chain, 5) == data[:2]
    assert world.borrower.recomputed == {"lost": 1}


def offer_of(chain: PromptChain, data: Sequence[bytes]) -> BlockOffer:
    records = records_of(chain)
    return BlockOffer(
        parents=[record.parent or b"" for record in records],
        tokens=[record.tokens for record in records],
        checksums=[checksum(each) for each in data],
    )


async def test_a_peer_that_hangs_is_given_up_in_time_and_all_who_wait_for_it(world: World) -> None:
    over = threading.Event()
    world.borrower = world.borrowing(timeout_s=0.5)
    source = world.door(lambda connection: (read_wanted(connection), over.wait(LIMIT_S)))  # type: ignore[arg-type, return-value]
    began_s = time.monotonic()
    await asyncio.gather(*(world.bring(chain_of(3), request_id=each, source=source) for each in range(4)))
    over.set()
    assert time.monotonic() - began_s < LIMIT_S / 2
    assert world.borrower.recomputed == {"timeout": 4}


async def test_a_request_that_leaves_ends_its_transfer_and_keeps_nothing(world: World) -> None:
    asked, over = threading.Event(), threading.Event()
    chain = chain_of(3)

    def slow(connection: Connection) -> None:
        read_wanted(connection)
        offer_blocks(connection, offer_of(chain, [b"x" * BLOCK_BYTES] * 3))
        asked.set()
        over.wait(LIMIT_S)
        with suppress(TransferError):
            connection.send(b"x")

    seq = world.sequence(1, world.door(slow))
    assert world.borrower.awaits(seq, path_of(chain), 0)
    await asyncio.to_thread(asked.wait, LIMIT_S)
    assert len(world.mine.hierarchy.exchange) == 3
    world.borrower.forget(1)
    async with asyncio.timeout(LIMIT_S):
        while len(world.mine.hierarchy.exchange):
            await asyncio.sleep(0.001)
    over.set()
    assert world.there(chain) == 0
    assert not world.borrower.recomputed


async def test_what_is_lent_stays_readable_though_it_is_dropped(world: World) -> None:
    chain = chain_of(3)
    data = world.other.save(records_of(chain))
    lent = world.other.hierarchy.exchange.lend(chain.keys)
    world.other.hierarchy.drop()
    world.other.save(records_of(chain_of(5, first_token=500)))
    assert [bytes(world.other.arena.view(each.slot)) for each in lent] == data
    world.other.hierarchy.check_integrity()
    world.other.hierarchy.exchange.back(lent)
    assert world.other.hierarchy.exchange.lend(chain.keys) == []


async def test_what_is_dropped_before_a_peer_takes_it_is_not_sent(world: World) -> None:
    chain = chain_of(3)
    world.other.save(records_of(chain))

    def offered_and_dropped() -> bytes:
        sock = socket.create_connection((world.source.host, world.source.port), timeout=LIMIT_S)
        with Connection(sock, deadline_s=time.monotonic() + LIMIT_S) as connection:
            offer = ask(connection, Wanted(layout=LAYOUT, keys=list(chain.keys)))
            world.calls(world.other.hierarchy.drop, timeout_s=LIMIT_S)
            take(connection, len(offer.checksums))
            with suppress(TransferError):
                return bytes(connection.receive(1))
            return b""

    assert await asyncio.to_thread(offered_and_dropped) == b""
    assert world.lender.handed_over == 0


async def test_what_comes_is_written_on_like_what_is_saved() -> None:
    disk = MemoryDisk(capacity_blocks=8, block_bytes=BLOCK_BYTES)
    rig = Rig(disk=disk)
    chain = chain_of(2)
    berths = rig.hierarchy.exchange.expect(records_of(chain))
    for berth in berths:
        rig.arena.view(berth.slot)[:] = b"y" * BLOCK_BYTES
    rig.hierarchy.exchange.arrived(berths, [checksum(b"y" * BLOCK_BYTES)] * 2)
    rig.run()
    assert [rig.tiers(record) for record in records_of(chain)] == ["DDR NVME"] * 2
    assert [change.record for change in rig.changes][:2] == records_of(chain)
    rig.close()
