"""Instances, routing and explanations through ``/admin/v1``, with requests going on."""

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import CHAT, COMPLETIONS, chat, instances, running_fleet, script
from tests.support.running_gateway import RunningGateway, eventually, running_gateway
from tests.support.scripted_engine import MODEL, ScriptedEngine
from tests.support.serving import serving

REGISTRATION_KEY = "registration-key-0123456789"


async def answered_by(gateway: RunningGateway, prompt: list[int]) -> str:
    async with gateway.post(COMPLETIONS, {"model": MODEL, "prompt": prompt}) as answer:
        assert answer.status == 200, await answer.text()
        return str(answer.headers["x-kvgate-instance"])


async def names(admin: Admin) -> dict[str, Any]:
    return {each["id"]: each for each in (await admin.ok("GET", "/instances"))["data"]}


async def test_an_instance_is_added_used_drained_resumed_and_taken_out(tmp_path: Path) -> None:
    async with (
        running_fleet(tmp_path, {"a": ScriptedEngine()}, admin_key=ADMIN_KEY) as fleet,
        ScriptedEngine().started() as b,
    ):
        admin = Admin(fleet.gateway)
        status, headers, made = await admin.call("POST", "/instances", {"id": "b", "url": b.url + "/"})
        assert (status, made) == (201, {"id": "b", "url": b.url, "draining": False, "role": None, "version": 1})
        await fleet.gateway.usable(2)
        shown = await admin.ok("GET", "/instances/b")
        assert (shown["source"], shown["state"], shown["models"]) == ("admin", "healthy", [MODEL])
        seen = {await answered_by(fleet.gateway, [number] * 40) for number in range(6)}
        assert seen == {"a", "b"}
        drained = await admin.ok("POST", "/instances/b/drain", if_match=headers["etag"])
        assert drained["draining"]
        served = len(b.requests)
        for number in range(4):
            assert await answered_by(fleet.gateway, [number] * 40) == "a"
        assert len(b.requests) == served
        await admin.ok("POST", "/instances/b/resume")
        await fleet.gateway.usable(2)
        assert await admin.ok("DELETE", "/instances/b") is None
        await eventually(lambda: _is(admin, {"a"}))
        status, _, said = await admin.call("DELETE", "/instances/b")
        assert (status, said["error"]["code"]) == (404, "instance_not_found")
        audit = [each["action"] for each in (await admin.ok("GET", "/audit"))["data"]]
        assert audit == ["delete", "resume", "drain", "create"]


async def test_nothing_of_an_instance_that_was_taken_out_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="gateway.upstream.event_feed")
    async with running_fleet(tmp_path, admin_key=ADMIN_KEY) as fleet:
        admin = Admin(fleet.gateway)
        for life in range(1, 3):
            async with ScriptedEngine().started() as engine:
                await admin.ok("POST", "/instances", {"id": "c", "url": engine.url})
                await fleet.gateway.usable(3)
                await eventually(lambda life=life: _followed(caplog, "c") == life)
                assert [task for task in asyncio.all_tasks() if task.get_name().endswith(":c")]
                await admin.ok("DELETE", "/instances/c")
                await eventually(lambda: _is(admin, {"a", "b"}))
                await eventually(lambda: not [task for task in asyncio.all_tasks() if task.get_name().endswith(":c")])
    assert not [each for each in caplog.messages if "background loop" in each]


def _followed(caplog: pytest.LogCaptureFixture, instance: str) -> int:
    return len([each for each in caplog.messages if each.startswith(f"instance {instance}: snapshot of")])


async def _is(admin: Admin, expected: set[str]) -> bool:
    return set(await names(admin)) == expected


async def test_no_request_is_lost_while_an_instance_is_taken_out_under_load(tmp_path: Path) -> None:
    async with (
        running_fleet(tmp_path, {"a": ScriptedEngine()}, admin_key=ADMIN_KEY) as fleet,
        ScriptedEngine().started() as b,
    ):
        admin = Admin(fleet.gateway)
        await admin.ok("POST", "/instances", {"id": "b", "url": b.url})
        await fleet.gateway.usable(2)
        stop = asyncio.Event()
        ends: Counter[tuple[int, bool]] = Counter()

        async def client() -> None:
            while not stop.is_set():
                async with fleet.gateway.post(
                    CHAT, chat(stream=True), x_script=script(chunks=8, chunk_s=0.02)
                ) as answer:
                    ends[answer.status, "[DONE]" in await answer.text()] += 1

        clients = [asyncio.create_task(client()) for _ in range(8)]
        await eventually(lambda: b.active >= 2)
        await admin.ok("DELETE", "/instances/b")
        await eventually(lambda: _is(admin, {"a"}))
        assert b.active == 0
        stop.set()
        await asyncio.gather(*clients)
        assert set(ends) == {(200, True)}


async def test_what_an_operator_said_is_there_after_a_restart(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(ScriptedEngine().started()) for _ in range(2)]
        settings: dict[str, Any] = {"instances": instances({"a": a}), "admin_key": ADMIN_KEY}
        async with running_gateway(tmp_path, **settings) as gateway:
            admin = Admin(gateway)
            await admin.ok("POST", "/instances", {"id": "b", "url": b.url})
            await admin.ok("POST", "/instances/a/drain")
            await admin.ok("PUT", "/routing", {"policy": "round_robin"})
            await gateway.usable(1)
        async with running_gateway(tmp_path, **settings) as gateway:
            admin = Admin(gateway)
            await gateway.usable(1)
            shown = await names(admin)
            assert (shown["a"]["draining"], shown["b"]["draining"], shown["b"]["source"]) == (True, False, "admin")
            assert (await admin.ok("GET", "/routing"))["policy"] == "round_robin"
            await admin.ok("DELETE", "/routing")
            assert (await admin.ok("GET", "/routing"))["policy"] == "cost_aware"


async def test_an_instance_that_moved_is_another_process(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(ScriptedEngine().started()) for _ in range(2)]
        gateway = await stack.enter_async_context(running_gateway(tmp_path, admin_key=ADMIN_KEY))
        admin = Admin(gateway)
        await admin.ok("PUT", "/instances/x", {"url": a.url})
        await gateway.usable(1)
        assert await answered_by(gateway, [1] * 40) == "x"
        await admin.ok("PUT", "/instances/x", {"url": b.url})

        async def moved() -> bool:
            shown = (await names(admin)).get("x")
            return shown is not None and (shown["url"], shown["state"]) == (b.url, "healthy")

        await eventually(moved)
        assert await answered_by(gateway, [1] * 40) == "x"
        assert (len(a.requests), len(b.requests)) == (1, 1)


async def test_gateways_that_share_a_store_come_to_the_same(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(ScriptedEngine().started())
        gateways = [
            await stack.enter_async_context(running_gateway(tmp_path, admin_key=ADMIN_KEY, store_poll_s=0.05))
            for _ in range(2)
        ]
        one, two = [Admin(each) for each in gateways]
        await one.ok("POST", "/instances", {"id": "a", "url": a.url})
        await two.ok("PUT", "/routing", {"policy": "least_load"})
        for gateway in gateways:
            await gateway.usable(1)

        async def agreed() -> bool:
            return (await one.ok("GET", "/routing"))["policy"] == "least_load"

        await eventually(agreed)
        await two.ok("POST", "/instances/a/drain")
        for gateway in gateways:
            await gateway.usable(0)


NO_INSTANCES: list[tuple[dict[str, Any], int, str]] = [
    ({"id": "a", "url": "http://127.0.0.1:1"}, 409, "instance id 'a' is taken by an instance from settings"),
    ({"id": "x", "url": "http://169.254.169.254"}, 400, "never an instance's"),
    ({"id": "x", "url": "http://8.8.8.8"}, 400, "outside the allowed networks"),
    ({"id": "x", "url": "file:///etc/passwd"}, 400, "the scheme 'file' is not allowed"),
    ({"id": "x", "url": "http://127.0.0.1:1/admin"}, 400, "without a path"),
    ({"id": "x y", "url": "http://127.0.0.1:1"}, 400, "id"),
    ({"id": "x", "url": "http://127.0.0.1:1", "weight": 2}, 400, "weight"),
    ({"id": "x"}, 400, "url"),
]


async def test_what_is_no_instance_is_refused_by_name(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, {"a": ScriptedEngine()}, admin_key=ADMIN_KEY) as fleet:
        admin = Admin(fleet.gateway)
        for body, status, said in NO_INSTANCES:
            got, _, answer = await admin.call("POST", "/instances", body)
            assert (got, said in answer["error"]["message"]) == (status, True), (body, answer)
            assert set(await names(admin)) == {"a"}


async def test_an_address_is_one_instance_however_it_is_written_and_never_this_gateway(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, {"a": ScriptedEngine()}, admin_key=ADMIN_KEY) as fleet:
        admin, own = Admin(fleet.gateway), fleet.gateway.url.rpartition(":")[2]
        for host in ("127.0.0.1", "localhost", "LocalHost", "127.1", "[::ffff:127.0.0.1]", "0x7f.1", "2130706433"):
            url = f"http://{host}:{fleet.engines['a'].port}"
            status, _, said = await admin.call("POST", "/instances", {"id": "again", "url": url})
            assert (status, said["error"]["code"]) == (409, "conflict"), url
            for method, path, body in (
                ("POST", "/instances", {"id": "self", "url": f"http://{host}:{own}"}),
                ("PUT", "/instances/self/lease", {"url": f"http://{host}:{own}"}),
            ):
                status, _, said = await admin.call(method, path, body)
                assert (status, said["error"]["code"]) == (400, "address_not_allowed"), host
                assert "is this gateway itself" in said["error"]["message"]
        assert set(await names(admin)) == {"a"}


async def test_a_request_that_comes_back_ends_at_once_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "instances.yaml"
    path.write_text("[]")
    settings = {"discovery_file": path, "discovery_interval_s": 0.05}
    async with running_fleet(tmp_path, {"a": ScriptedEngine()}, admin_key=ADMIN_KEY, **settings) as fleet:
        admin, a = Admin(fleet.gateway), fleet.engines["a"]
        path.write_text(json.dumps([{"id": "self", "url": fleet.gateway.url}]))

        async def known() -> bool:
            reason = (await names(admin)).get("self", {}).get("reason", "")
            return "it is this gateway itself" in reason

        await eventually(known)
        async with fleet.gateway.post(CHAT, chat(), via="1.0 fred, HTTP/1.1 other (kvgate)") as answer:
            assert answer.status == 200
        own = a.headers[-1]["via"]  # the last of them
        assert own.startswith("1.1 kvgate-")
        async with fleet.gateway.post(CHAT, chat(), via=f"1.0 fred, {own}, 1.1 other") as answer:
            assert answer.status == 508
            said = await answer.json()
        assert (said["error"]["code"], said["error"]["type"]) == ("loop_detected", "upstream_error")
        assert len(a.requests) == 1


async def test_a_redirect_of_a_registered_instance_is_not_followed(tmp_path: Path) -> None:
    from aiohttp import web

    async with ScriptedEngine().started() as inside:

        async def elsewhere(request: web.Request) -> web.Response:
            raise web.HTTPTemporaryRedirect(inside.url + request.path)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", elsewhere)
        async with serving(app) as url, running_gateway(tmp_path, admin_key=ADMIN_KEY) as gateway:
            admin = Admin(gateway)
            await admin.ok("POST", "/instances", {"id": "x", "url": url})

            async def told() -> bool:
                return "/health answered 307" in (await names(admin))["x"]["reason"]

            await eventually(told)
            assert inside.requests == []


async def test_of_several_addresses_said_at_once_for_one_instance_the_last_holds(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine().started()) for _ in range(4)]
        gateway = await stack.enter_async_context(
            running_gateway(tmp_path, admin_key=ADMIN_KEY, registration_key=REGISTRATION_KEY)
        )
        engine = Admin(gateway, REGISTRATION_KEY)
        said = await asyncio.gather(
            *(
                engine.call("PUT", "/instances/x/lease", {"url": engines[place % 4].url, "ttl_s": 60})
                for place in range(16)
            )
        )
        assert {status for status, _, _ in said} == {200}
        await gateway.usable(1)
        assert set(await names(Admin(gateway))) == {"x"}


async def test_instances_register_themselves_stay_while_they_renew_and_go_when_they_do_not(tmp_path: Path) -> None:
    async with (
        ScriptedEngine().started() as a,
        running_gateway(tmp_path, admin_key=ADMIN_KEY, registration_key=REGISTRATION_KEY) as gateway,
    ):
        admin, engine = Admin(gateway), Admin(gateway, REGISTRATION_KEY)
        said = await engine.ok("PUT", "/instances/self-1/lease", {"url": a.url, "ttl_s": 60})
        assert (said["source"], said["lease_left_s"] > 1) == ("self", True)
        await gateway.usable(1)
        for _ in range(5):
            await engine.ok("PUT", "/instances/self-1/lease", {"url": a.url, "ttl_s": 1})
            await asyncio.sleep(0.25)
        await engine.ok("PUT", "/instances/self-1/lease", {"url": a.url, "ttl_s": 1})
        assert set(await names(admin)) == {"self-1"}
        await eventually(lambda: _is(admin, set()))
        await engine.ok("PUT", "/instances/self-1/lease", {"url": a.url, "ttl_s": 60})
        await gateway.usable(1)
        await engine.ok("DELETE", "/instances/self-1/lease")
        await eventually(lambda: _is(admin, set()))


async def test_the_registration_key_registers_and_does_nothing_else(tmp_path: Path) -> None:
    async with (
        ScriptedEngine().started() as a,
        running_gateway(
            tmp_path, admin_key=ADMIN_KEY, registration_key=REGISTRATION_KEY, instances=instances({"a": a})
        ) as gateway,
    ):
        engine = Admin(gateway, REGISTRATION_KEY)
        for method, path, body in (
            ("GET", "/instances", None),
            ("POST", "/instances", {"id": "x", "url": "http://127.0.0.1:1"}),
            ("DELETE", "/instances/a", None),
            ("POST", "/instances/a/drain", None),
            ("PUT", "/routing", {"policy": "round_robin"}),
            ("GET", f"/explain?model={MODEL}&prompt=x", None),
        ):
            assert (await engine.call(method, path, body))[0] == 401
        for key in (None, "something else entirely"):
            status, _, _ = await Admin(gateway, key).call("PUT", "/instances/x/lease", {"url": "http://127.0.0.1:1"})
            assert status == 401
        status, _, said = await engine.call("PUT", "/instances/a/lease", {"url": "http://127.0.0.1:1"})
        assert (status, "named by settings" in said["error"]["message"]) == (409, True)
        status, _, said = await engine.call("PUT", "/instances/x/lease", {"url": "http://169.254.169.254"})
        assert (status, said["error"]["code"]) == (400, "address_not_allowed")


async def test_a_policy_is_swapped_between_two_requests_and_what_is_cached_is_still_known(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, admin_key=ADMIN_KEY, route_memory_s=0) as fleet:
        admin = Admin(fleet.gateway)
        prompt = list(range(200))
        home = await answered_by(fleet.gateway, prompt)
        await fleet.gateway.counted(f'kvgate_resident_blocks{{instance="{home}",tier="HBM"}}', 12)
        await admin.ok("PUT", "/routing", {"policy": "round_robin"})
        assert {await answered_by(fleet.gateway, [7] * 20) for _ in range(2)} == {"a", "b"}
        changed = await admin.ok("PUT", "/routing", {"policy": "cost_aware", "prefill_tokens_per_s": 500})
        assert (changed["policy"], changed["prefill_tokens_per_s"], changed["version"]) == ("cost_aware", 500, 2)
        async with fleet.gateway.post(COMPLETIONS, {"model": MODEL, "prompt": prompt}) as answer:
            assert (answer.headers["x-kvgate-instance"], answer.headers["x-kvgate-matched-tokens"]) == (home, "192")
        status, _, said = await admin.call("PUT", "/routing", {"policy": "best"})
        assert (status, "cost_aware" in said["error"]["message"]) == (400, True)


async def test_an_explanation_says_where_a_prompt_would_go_and_the_prompt_then_goes_there(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, admin_key=ADMIN_KEY, route_memory_s=0) as fleet:
        admin = Admin(fleet.gateway)
        prompt = list(range(200))
        home = await answered_by(fleet.gateway, prompt)
        await fleet.gateway.counted(f'kvgate_resident_blocks{{instance="{home}",tier="HBM"}}', 12)
        asked = {"model": MODEL, "prompt": [*prompt, *range(900, 1000)]}
        said = await admin.ok("POST", "/explain", asked)
        assert (said["instance"], said["basis"], said["matched_tokens"]) == (home, "prefix", 192)
        assert (said["prompt_tokens"], said["uncached_tokens"], said["fingerprint"]) == (300, 108, "tokens")
        terms = {each["instance"]: each["cost_s"] for each in said["candidates"]}
        assert terms[home]["prefill"] < next(each for name, each in terms.items() if name != home)["prefill"]
        assert said["separation"] is None  # nobody computes prompts for others here
        assert said["plan"] == (
            f"%cached = load @{home} {{request=explained, start=0, end=192, tier=HBM}}\n"
            f"%kv = prefill(%cached) @{home} {{request=explained, start=192, end=300}}\n"
            f"%answer, %tail = decode(%cached, %kv) @{home} {{request=explained, start=300, max_tokens=256}}\n"
            "results %answer, %tail\n"
        )
        assert said["predicted_ttft_s"] == pytest.approx(
            sum(value for name, value in terms[home].items() if name not in {"work", "room", "spread"})
        )
        again = await admin.ok("POST", "/explain", asked)
        assert {**again, "candidates": said["candidates"]} == said
        assert await answered_by(fleet.gateway, asked["prompt"]) == home
        cache = fleet.engines[home].cache
        assert cache is not None
        hashes = "&".join(f"hash={each.hex()}" for each in list(cache.resident)[:5])
        by_hash = await admin.ok("GET", f"/explain?model={MODEL}&{hashes}")
        assert (by_hash["instance"], by_hash["matched_tokens"], by_hash["fingerprint"]) == (home, 80, "hashes")
        text = await admin.ok("GET", f"/explain?model={MODEL}&prompt=hello")
        assert (text["fingerprint"], text["reason"]) == ("text", "no_tokenizer")
        await admin.ok("POST", f"/instances/{home}/drain")
        moved = await admin.ok("POST", "/explain", asked)
        assert moved["instance"] != home
        assert moved["left_out"] == [{"instance": home, "why": "it is draining"}]
        for body, code in (({"model": "none", "prompt": "x"}, 404), ({"model": MODEL}, 400)):
            assert (await admin.call("POST", "/explain", body))[0] == code
        assert json.dumps(prompt)[:20] not in json.dumps(await admin.ok("GET", "/audit"))
