"""The index follows the engines' events, and requests follow the index."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from gateway.upstream.backoff import Backoff, Reason
from kvcontrol.core import AllBlocksCleared, Seq
from kvcontrol.core.wire import MAX_SEQ, encode_seq
from tests.support.fleet import COMPLETIONS, Fleet, instances, running_fleet
from tests.support.running_gateway import RunningGateway, eventually, running_gateway
from tests.support.scripted_cache import ScriptedCache
from tests.support.scripted_engine import MODEL, ScriptedEngine

BLOCK = 16


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path, route_memory_s=0) as running:
        yield running


class Seen:
    def __init__(self, headers: dict[str, str], cached: int) -> None:
        self.instance = headers["x-kvgate-instance"]
        self.matched = int(headers["x-kvgate-matched-tokens"])
        self.route = headers["x-kvgate-route"]
        self.cached = cached


async def ask(gateway: RunningGateway, prompt: Sequence[int], key: str | None = None) -> Seen:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with gateway.post(COMPLETIONS, {"model": MODEL, "prompt": list(prompt)}, **headers) as answer:
        assert answer.status == 200, await answer.text()
        usage = (await answer.json())["usage"]
        return Seen(dict(answer.headers), usage["prompt_tokens_details"]["cached_tokens"])


async def eventually_at_least(gateway: RunningGateway, line: str, value: float) -> None:
    async def there() -> bool:
        return await gateway.metric(line) >= value

    await eventually(there)


async def holds(gateway: RunningGateway, name: str, blocks: int) -> None:
    await gateway.counted(f'kvgate_resident_blocks{{instance="{name}",tier="HBM"}}', blocks)


def cache_of(fleet: Fleet, name: str) -> ScriptedCache:
    cache = fleet.engines[name].cache
    assert cache is not None
    return cache


async def test_a_second_turn_goes_to_the_holder_and_matches_what_the_engine_reports(fleet: Fleet) -> None:
    turn = list(range(100))
    first = await ask(fleet.gateway, turn)
    assert (first.matched, first.route) == (0, "load;matched=0;reason=cold")
    await holds(fleet.gateway, first.instance, 6)
    second = await ask(fleet.gateway, [*turn, *range(500, 560)])
    assert second.instance == first.instance
    assert second.matched == second.cached == 96
    assert second.route == "prefix;matched=96;tier=hbm;reason=longest_match"
    await eventually(lambda: fleet.active == 0)
    await fleet.gateway.counted("kvgate_matched_tokens_total", 96)
    await fleet.gateway.counted("kvgate_cached_tokens_total", 96)


@pytest.mark.parametrize(("length", "expected"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
async def test_the_last_prompt_token_is_never_matched(fleet: Fleet, length: int, expected: int) -> None:
    prompt = list(range(length))
    first = await ask(fleet.gateway, prompt)
    await holds(fleet.gateway, first.instance, length // BLOCK)
    again = await ask(fleet.gateway, prompt)
    assert again.matched == again.cached == expected


async def test_tenants_with_the_same_prompt_match_nothing_of_each_others(tmp_path: Path) -> None:
    keys = [{"key": "k1", "tenant": "acme"}, {"key": "k2", "tenant": "umbrella"}, {"key": "k3", "tenant": "acme"}]
    async with running_fleet(tmp_path, {"a": ScriptedEngine()}, api_keys=keys) as fleet:
        prompt = list(range(64))
        assert (await ask(fleet.gateway, prompt, "k1")).matched == 0
        await holds(fleet.gateway, "a", 4)
        other = await ask(fleet.gateway, prompt, "k2")
        assert other.matched == other.cached == 0
        same = await ask(fleet.gateway, prompt, "k3")
        assert same.matched == same.cached == 48
        salts = [headers["x-kvgate-cache-salt"] for headers in fleet.engines["a"].headers]
        assert salts[0] == salts[2] != salts[1]


async def test_in_open_mode_each_key_is_its_own_tenant_and_so_is_none(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, {"a": ScriptedEngine()}) as fleet:
        prompt = list(range(64))
        for number, key in enumerate([None, "one", "two"], start=1):
            first = await ask(fleet.gateway, prompt, key)
            assert first.matched == first.cached == 0
            await holds(fleet.gateway, "a", 4 * number)
            again = await ask(fleet.gateway, prompt, key)
            assert again.matched == again.cached == 48


async def test_removed_and_cleared_blocks_no_longer_attract(fleet: Fleet) -> None:
    prompt = list(range(64))
    first = await ask(fleet.gateway, prompt)
    await holds(fleet.gateway, first.instance, 4)
    cache = cache_of(fleet, first.instance)
    await cache.remove(list(cache.resident)[2:])
    await holds(fleet.gateway, first.instance, 2)
    assert (await ask(fleet.gateway, prompt)).matched == 32
    await holds(fleet.gateway, first.instance, 4)
    await cache.clear()
    await holds(fleet.gateway, first.instance, 0)
    assert (await ask(fleet.gateway, prompt)).matched == 0


async def test_a_hole_in_the_events_is_filled_by_a_replay(fleet: Fleet) -> None:
    cache = cache_of(fleet, "a")
    await cache.store(range(64), "s")
    await holds(fleet.gateway, "a", 4)
    snapshots = cache.snapshots
    cache.muted = True
    await cache.store(range(1000, 1064), "s")
    cache.muted = False
    await cache.store(range(2000, 2064), "s")
    await holds(fleet.gateway, "a", 12)
    assert cache.snapshots == snapshots
    await fleet.gateway.counted('kvgate_kv_resyncs_total{instance="a",reason="replayed"}', 1)


async def test_a_hole_that_is_no_longer_replayed_is_filled_by_a_snapshot(fleet: Fleet) -> None:
    cache = cache_of(fleet, "a")
    await cache.store(range(16), "s")
    await holds(fleet.gateway, "a", 1)
    cache.muted = True
    for number in range(3):
        await cache.store(range(1000 * number, 1000 * number + 32), "s")
    cache._sent.clear()
    cache.muted = False
    await cache.store(range(9000, 9016), "s")
    await holds(fleet.gateway, "a", len(cache.resident))
    await fleet.gateway.counted('kvgate_kv_resyncs_total{instance="a",reason="gap"}', 1)


async def test_events_that_were_lost_with_none_after_them_are_noticed(fleet: Fleet) -> None:
    cache = cache_of(fleet, "a")
    cache.muted = True
    await cache.store(range(64), "s")
    await holds(fleet.gateway, "a", 4)
    await fleet.gateway.counted('kvgate_kv_resyncs_total{instance="a",reason="behind"}', 1)


async def test_a_snapshot_of_batches_that_nobody_published_is_found_out(fleet: Fleet) -> None:
    cache = cache_of(fleet, "a")
    await cache.store(range(64), "s")
    await holds(fleet.gateway, "a", 4)
    cache.claimed_seq = MAX_SEQ
    await cache.publish_raw(b"\xc1 nobody can read this, so a new snapshot is asked for")
    await fleet.gateway.counted('kvgate_kv_resyncs_total{instance="a",reason="undecodable"}', 1)
    await cache.store(range(1000, 1064), "s")
    await eventually_at_least(fleet.gateway, 'kvgate_kv_resyncs_total{instance="a",reason="snapshot_invalid"}', 1)
    cache.claimed_seq = None
    await cache.store(range(2000, 2016), "s")
    await holds(fleet.gateway, "a", 9)


async def test_a_snapshot_and_a_report_that_lie_alike_are_found_out_by_what_is_published(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.upstream.event_feed._OLD_NEWS_S", 0.3)
    cache = cache_of(fleet, "a")
    await cache.store(range(64), "s")
    await holds(fleet.gateway, "a", 4)
    cache.claimed_seq = cache.reported_seq = MAX_SEQ
    await cache.publish_raw(b"\xc1 nobody can read this, so a new snapshot is asked for")

    async def found_out() -> bool:
        await cache.publish(AllBlocksCleared())
        return await fleet.gateway.metric('kvgate_kv_resyncs_total{instance="a",reason="snapshot_invalid"}') >= 1

    await eventually(found_out)


async def test_a_restarted_engine_is_empty_until_it_says_otherwise(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        a, b = ScriptedEngine(), ScriptedEngine()
        await stack.enter_async_context(b.started())
        life = AsyncExitStack()
        await life.enter_async_context(a.started())
        gateway = await stack.enter_async_context(running_gateway(tmp_path, instances=instances({"a": a, "b": b})))
        await gateway.usable(2)
        assert a.cache is not None
        await a.cache.store(range(64), "s")
        await holds(gateway, "a", 4)
        port = a.port
        await life.aclose()
        await holds(gateway, "a", 0)
        await stack.enter_async_context(a.started(port))
        await gateway.usable(2)
        await a.cache.store(range(32), "s")
        await holds(gateway, "a", 2)


async def test_an_engine_that_restarts_unnoticed_is_recognised_by_its_epoch(fleet: Fleet) -> None:
    engine = fleet.engines["a"]
    old = cache_of(fleet, "a")
    await old.store(range(64), "s")
    await holds(fleet.gateway, "a", 4)
    engine.cache = ScriptedCache(old.identity)
    await engine.cache.store(range(5000, 5016), "s")
    await holds(fleet.gateway, "a", 1)
    await old.close()


async def test_a_restarted_gateway_rebuilds_residency_and_knows_its_tenants(tmp_path: Path) -> None:
    prompt = list(range(64))
    async with AsyncExitStack() as stack:
        engines = {"a": ScriptedEngine(), "b": ScriptedEngine()}
        for engine in engines.values():
            await stack.enter_async_context(engine.started())
        async with running_gateway(tmp_path, instances=instances(engines)) as gateway:
            await gateway.usable(2)
            first = await ask(gateway, prompt, "k")
            await holds(gateway, first.instance, 4)
        async with running_gateway(tmp_path, instances=instances(engines)) as gateway:
            await gateway.usable(2)
            again = await ask(gateway, prompt, "k")
            assert (again.instance, again.matched, again.cached) == (first.instance, 48, 48)


@pytest.mark.parametrize("shape", ["array", "map batch"])
async def test_events_in_other_engines_shapes_are_read(fleet: Fleet, shape: str) -> None:
    cache = cache_of(fleet, "a")
    await cache.store(range(5000, 5016), "s")
    await holds(fleet.gateway, "a", 1)  # from here on events arrive; a lost one would be in no snapshot
    hashes = cache.hashes(range(32), "s")
    if shape == "array":
        raw: object = [1.0, [["BlockStored", hashes, None, list(range(32)), 16, None, "GPU", None]], 0]
    else:
        stored = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "block_size": 16}
        raw = {"ts": 1.0, "events": [stored | {"token_ids": list(range(32))}], "data_parallel_rank": 0}
    await cache.publish_raw(msgspec.msgpack.encode(raw))
    await holds(fleet.gateway, "a", 3)


GOOD = {"type": "BlockStored", "block_hashes": [b"x" * 16], "parent_block_hash": None, "block_size": 16}


@pytest.mark.parametrize(
    "message",
    [
        pytest.param([b"\xc1 not msgpack"], id="no msgpack"),
        pytest.param([msgspec.msgpack.encode([1.0, [GOOD, {"type": "Novel"}], None])], id="an unknown event"),
        pytest.param([msgspec.msgpack.encode([1.0, [GOOD | {"block_hashes": [b""]}], None])], id="an empty name"),
        pytest.param([msgspec.msgpack.encode([1.0, [GOOD | {"block_size": -16}], None])], id="a negative size"),
        pytest.param([], id="no payload"),
        pytest.param([b"", encode_seq(Seq(-5)), b""], id="a negative number"),
        pytest.param([b"", encode_seq(Seq(2**62)), b""], id="an absurd number"),
        pytest.param([b"", b"short", b""], id="no number"),
    ],
)
async def test_what_can_not_be_read_is_counted_and_makes_a_new_snapshot(fleet: Fleet, message: list[bytes]) -> None:
    cache = cache_of(fleet, "a")
    await cache.store(range(64), "s")
    await holds(fleet.gateway, "a", 4)
    await fleet.gateway.counted('kvgate_kv_events_undecodable_total{instance="a"}', 0)
    snapshots = cache.snapshots
    cache.muted = True
    await cache.remove(list(cache.resident)[2:])
    cache.muted = False
    cache._sent.clear()  # the batch that could not be read was this removal
    if len(message) == 1:
        cache.seq -= 1
        await cache.publish_raw(message[0])
    else:
        await cache.send(*(message or [b"alone"]))
    await holds(fleet.gateway, "a", 2)
    await fleet.gateway.counted('kvgate_kv_events_undecodable_total{instance="a"}', 1)
    await fleet.gateway.counted('kvgate_kv_resyncs_total{instance="a",reason="undecodable"}', 1)
    assert cache.snapshots == snapshots + 1
    await cache.store(range(1000, 1016), "s")
    await holds(fleet.gateway, "a", 3)


@pytest.mark.parametrize(("reason", "skipped"), [("undecodable", 0), ("gap", 3)])
async def test_a_peer_that_goes_on_lying_is_asked_for_fewer_and_fewer_snapshots(
    fleet: Fleet, reason: str, skipped: int
) -> None:
    cache = cache_of(fleet, "a")
    await cache.store(range(64), "s")
    await holds(fleet.gateway, "a", 4)
    snapshots = cache.snapshots
    began_s = time.monotonic()
    line = f'kvgate_kv_resyncs_total{{instance="a",reason="{reason}"}}'
    for _ in range(2_000):
        if await fleet.gateway.metric(line) >= 3:
            break
        cache.seq += skipped
        await cache.publish_raw(b"\xc1" if reason == "undecodable" else msgspec.msgpack.encode([1.0, []]))
        await asyncio.sleep(0.01)
    assert await fleet.gateway.metric(line) >= 3
    assert cache.snapshots - snapshots <= 4
    pauses = Backoff()
    assert time.monotonic() - began_s >= sum(pauses.pause_s(Reason(reason), 0.0) for _ in range(2))
    await cache.store(range(5000, 5016), "s")
    await holds(fleet.gateway, "a", 5)  # it is believed again once it tells the truth


@pytest.mark.parametrize(
    "lie",
    [
        {"seq": -5},
        {"seq": 2**62},
        {"tiers": {"TAPE": []}, "parents": {"TAPE": []}},
        {"tiers": {"HBM": [""]}, "parents": {"HBM": [""]}},
        {"tiers": {"HBM": ["ab" * 16, "cd" * 16]}, "parents": {"HBM": ["cd" * 16, "ab" * 16]}},
    ],
    ids=["negative number", "absurd number", "unknown tier", "nameless block", "cycle"],
)
async def test_a_snapshot_that_can_not_be_is_not_believed_until_it_can(fleet: Fleet, lie: dict[str, object]) -> None:
    engine, cache = fleet.engines["a"], cache_of(fleet, "a")
    await cache.store(range(64), "s")
    await holds(fleet.gateway, "a", 4)
    engine.snapshot_changes = lie
    await cache.publish_raw(b"\xc1")
    await eventually_at_least(fleet.gateway, 'kvgate_kv_resyncs_total{instance="a",reason="snapshot_invalid"}', 1)
    assert await fleet.gateway.metric('kvgate_resident_blocks{instance="a",tier="HBM"}') == 0
    assert await fleet.gateway.metric('kvgate_kv_events_undecodable_total{instance="a"}') >= 2
    engine.snapshot_changes = {}
    await holds(fleet.gateway, "a", 4)


async def test_cold_prompts_spread_and_siblings_of_a_burst_stay_together(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        places = [(await ask(fleet.gateway, range(n * 1000, n * 1000 + 64))).instance for n in range(8)]
        assert sorted(places) == ["a"] * 4 + ["b"] * 4
        for name in "ab":
            cache_of(fleet, name).muted = True
        shared = list(range(50_000, 50_640))
        burst = await asyncio.gather(*(ask(fleet.gateway, [*shared, n]) for n in range(4)))
        assert len({each.instance for each in burst}) == 1
        assert {each.route.partition(";")[0] for each in burst[1:]} == {"prefix"}


async def test_the_owner_of_a_prefix_that_dies_costs_one_retry_at_most(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        engines = {"a": ScriptedEngine(), "b": ScriptedEngine()}
        lives = {name: AsyncExitStack() for name in engines}
        for name, engine in engines.items():
            await lives[name].enter_async_context(engine.started())
            stack.push_async_exit(lives[name])
        gateway = await stack.enter_async_context(
            running_gateway(tmp_path, instances=instances(engines), health_interval_s=1.0)
        )
        await gateway.usable(2)
        prompt = list(range(640))
        owner = (await ask(gateway, prompt)).instance
        await holds(gateway, owner, 40)
        await lives[owner].aclose()
        for _ in range(3):
            seen = await ask(gateway, prompt)
            assert seen.instance != owner
        assert await gateway.metric('kvgate_retries_total{cause="connect"}') <= 1


async def test_residency_survives_a_few_missing_reports_and_not_many(fleet: Fleet) -> None:
    cache = cache_of(fleet, "a")
    await cache.store(range(64), "s")
    await holds(fleet.gateway, "a", 4)
    snapshots = cache.snapshots
    fleet.engines["a"].stats_failures = 2
    await eventually(lambda: fleet.engines["a"].stats_failures == 0)
    await cache.store(range(1000, 1016), "s")
    await holds(fleet.gateway, "a", 5)
    assert cache.snapshots == snapshots
    fleet.engines["a"].stats_failures = 10**6
    await holds(fleet.gateway, "a", 0)
    fleet.engines["a"].stats_failures = 0
    await holds(fleet.gateway, "a", 5)


async def test_predicted_times_to_the_first_token_are_compared_with_real_ones(fleet: Fleet) -> None:
    body = {"model": MODEL, "prompt": list(range(100)), "stream": True}
    for script in ('{"ttft_s": 0.05}', '{"ttft_s": 0.05}', '{"status": 400}'):
        async with fleet.gateway.post(COMPLETIONS, body, x_script=script) as answer:
            await answer.read()
    await fleet.gateway.counted("kvgate_ttft_real_seconds_count", 2)
    assert await fleet.gateway.metric("kvgate_ttft_predicted_seconds_count") == 2
    assert await fleet.gateway.metric("kvgate_ttft_error_seconds_count") == 2
    assert await fleet.gateway.metric("kvgate_ttft_real_seconds_sum") >= 0.1
    async with fleet.gateway.post(COMPLETIONS, body | {"stream": False}) as answer:
        await answer.read()
    await fleet.gateway.counted('kvgate_requests_total{operation="completions",outcome="ok"}', 3)
    assert await fleet.gateway.metric("kvgate_ttft_real_seconds_count") == 2
