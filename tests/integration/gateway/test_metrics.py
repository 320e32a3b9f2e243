"""What a gateway says of its requests on ``/metrics``: who, how long, in which step; and with which trace."""

import asyncio
from itertools import count
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from dashboards.panel import Proof
from gateway.telemetry.lag import LoopLag
from gateway.telemetry.metrics import Metrics
from kvcontrol.core.control import CACHE_SALT_HEADER
from kvcontrol.core.tenant import tenant_of_salt
from kvcontrol.series import GATEWAY, LABELS, MOST_MODELS, MOST_TENANTS, OTHER, Kind
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import CHAT, Fleet, chat, running_fleet, script
from tests.support.panels import queries_of, until_all_find
from tests.support.prometheus import Target, running_prometheus
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import MODEL, Script, ScriptedEngine

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


async def ask(fleet: Fleet, *, stream: bool = False, **headers: str) -> int:
    async with fleet.gateway.post(CHAT, chat(stream=stream), **headers) as answer:
        await answer.read()
        return int(answer.status)


async def families(fleet: Fleet) -> dict[str, Metric]:
    async with fleet.gateway.get("/metrics") as answer:
        assert answer.headers["content-type"].startswith("text/plain")
        return {each.name: each for each in text_families(await answer.text())}


async def test_every_series_of_the_catalogue_is_exposed_as_it_says_and_no_other(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await ask(fleet)
        await fleet.gateway.counted(f'kvgate_model_requests_total{{model="{MODEL}",outcome="ok"}}', 1)
        found = await families(fleet)
        own = {name: each for name, each in found.items() if not name.startswith("process_")}
        declared = {each.name: each for each in GATEWAY if each.appears not in {"with several workers", "with tracing"}}
        assert own.keys() == declared.keys()
        for name, family in own.items():
            series = declared[name]
            assert family.type == series.kind
            assert family.documentation == series.help
            extra = {"le"} if series.kind is Kind.HISTOGRAM else set()
            for sample in family.samples:
                assert set(sample.labels) - extra == set(series.labels), sample
                assert sample.labels.keys() - extra <= LABELS.keys()


async def test_panels_of_accidents_find_them_in_a_real_prometheus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, run = count(), LoopLag.run

    async def broken_at_first(self: LoopLag) -> None:
        if next(starts) == 0:
            raise RuntimeError("as a test wants it")
        await run(self)

    monkeypatch.setattr(LoopLag, "run", broken_at_first)
    async with running_fleet(tmp_path, routing_policy="round_robin") as fleet:
        fleet.engines["a"].default = Script(status=503)
        assert [await ask(fleet), await ask(fleet)] == [200, 200]
        cache = fleet.engines["b"].cache
        assert cache is not None
        await cache.publish_raw(b"\xc1 nobody can read this")
        await fleet.gateway.counted('kvgate_kv_resyncs_total{instance="b",reason="undecodable"}', 1)

        def look() -> None:
            target = Target("kvgate-gateway", fleet.gateway.url.removeprefix("http://"), {"gateway": "g"})
            with running_prometheus(tmp_path, [target]) as prometheus:
                until_all_find(prometheus, queries_of(Proof.ACCIDENTS))

        await asyncio.to_thread(look)


async def test_each_step_of_a_request_is_timed(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await ask(fleet)
        for stage in ("receive", "parse", "fingerprint", "admission", "plan"):
            await fleet.gateway.counted(f'kvgate_stage_seconds_count{{stage="{stage}"}}', 1)


async def test_each_pause_within_a_stream_is_counted(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await ask(fleet, stream=True, x_script=script(chunks=5, chunk_s=0.05))
        await fleet.gateway.counted('kvgate_time_per_output_token_seconds_count{operation="chat_completions"}', 1)
        assert await fleet.gateway.metric("kvgate_inter_token_seconds_count") >= 4
        assert await fleet.gateway.metric("kvgate_inter_token_seconds_sum") >= 0.15
        await ask(fleet)
        assert await fleet.gateway.metric("kvgate_inter_token_seconds_count") < 10, "a whole answer has none"


async def test_a_refused_request_is_timed_as_far_as_it_came(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        async with fleet.gateway.post(CHAT, chat(model="nobody-serves-this")) as answer:
            assert answer.status == 404
        await fleet.gateway.counted('kvgate_model_requests_total{model="other",outcome="client_error"}', 1)
        assert await fleet.gateway.metric('kvgate_stage_seconds_count{stage="receive"}') == 1
        assert await fleet.gateway.metric('kvgate_stage_seconds_count{stage="parse"}') == 0
        async with fleet.gateway.get("/metrics") as answer:
            assert "nobody-serves-this" not in await answer.text()


async def test_only_tenants_that_are_known_by_name_have_series_and_they_go_with_the_tenant(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, admin_key=ADMIN_KEY) as fleet:
        await ask(fleet, authorization="Bearer whoever")  # as long as there is no key, any is accepted
        await ask(fleet)
        await fleet.gateway.counted('kvgate_tenant_requests_total{outcome="ok",tenant="other"}', 1)
        await fleet.gateway.counted('kvgate_tenant_requests_total{outcome="ok",tenant="anonymous"}', 1)
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/acme", {})
        key = (await admin.ok("POST", "/keys", {"tenant": "acme"}))["key"]
        await admin.ok("PUT", "/quotas/acme", {"requests_per_min": 600})
        assert await ask(fleet, authorization=f"Bearer {key}") == 200
        await fleet.gateway.counted('kvgate_tenant_requests_total{outcome="ok",tenant="acme"}', 1)
        await fleet.gateway.counted('kvgate_tenant_quota{quota="requests_per_min",tenant="acme"}', 600)
        salts = {sent[CACHE_SALT_HEADER] for each in fleet.engines.values() for sent in each.headers[-1:]}
        infos = [f'kvgate_tenant_info{{kv_tenant="{tenant_of_salt(salt)}",tenant="acme"}}' for salt in salts]
        assert [await fleet.gateway.metric(each) for each in infos].count(1) == 1
        for made in (await admin.ok("GET", "/keys"))["data"]:
            await admin.ok("DELETE", f"/keys/{made['id']}")
        await admin.ok("DELETE", "/tenants/acme")

        async def gone() -> bool:
            async with fleet.gateway.get("/metrics") as answer:
                return 'tenant="acme"' not in await answer.text()

        await eventually(gone)


async def test_a_tenant_that_is_gone_before_anybody_looked_leaves_no_series(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, admin_key=ADMIN_KEY) as fleet:
        admin = Admin(fleet.gateway)
        for tenant in ("brief", "other"):
            await admin.ok("PUT", f"/tenants/{tenant}", {})
            key = (await admin.ok("POST", "/keys", {"tenant": tenant}))["key"]
            assert await ask(fleet, authorization=f"Bearer {key}") == 200
        for made in (await admin.ok("GET", "/keys"))["data"]:
            await admin.ok("DELETE", f"/keys/{made['id']}")
        for tenant in ("brief", "other"):
            await admin.ok("DELETE", f"/tenants/{tenant}")

        async def settled() -> bool:
            async with fleet.gateway.get("/metrics") as answer:
                text = await answer.text()
            return (
                'tenant="brief"' not in text and 'kvgate_tenant_requests_total{outcome="ok",tenant="other"} 1' in text
            )

        await eventually(settled)


async def test_a_model_that_nobody_serves_any_more_leaves_no_series(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, admin_key=ADMIN_KEY) as fleet, ScriptedEngine(model="m2").started() as engine:
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/instances/brief", {"url": engine.url})
        await fleet.gateway.usable(3)
        async with fleet.gateway.post(CHAT, {**chat(), "model": "m2"}) as answer:
            assert answer.status == 200
        assert await ask(fleet) == 200
        await fleet.gateway.counted('kvgate_model_requests_total{model="m2",outcome="ok"}', 1)
        await admin.ok("DELETE", "/instances/brief")

        async def gone() -> bool:
            async with fleet.gateway.get("/metrics") as answer:
                return 'model="m2"' not in await answer.text()

        await eventually(gone)
        assert await fleet.gateway.metric(f'kvgate_model_requests_total{{model="{MODEL}",outcome="ok"}}') == 1


def test_models_beyond_those_that_may_have_series_are_one() -> None:
    metrics = Metrics()
    names = [metrics.model(f"m{place}") for place in range(MOST_MODELS + 2)]
    assert names[-3:] == [f"m{MOST_MODELS - 1}", OTHER, OTHER]
    assert metrics.model("m0") == "m0"


async def test_more_tenants_than_may_have_series_are_one(tmp_path: Path) -> None:
    keys = [{"key": f"k{place:03}", "tenant": f"t{place:03}"} for place in range(MOST_TENANTS + 2)]
    async with running_fleet(tmp_path, api_keys=keys) as fleet:
        for key in keys[-3:]:
            assert await ask(fleet, authorization=f"Bearer {key['key']}") == 200
        await fleet.gateway.counted('kvgate_tenant_requests_total{outcome="ok",tenant="other"}', 2)
        assert await fleet.gateway.metric(f'kvgate_tenant_requests_total{{outcome="ok",tenant="t{99:03}"}}') == 1


async def test_who_accepts_openmetrics_gets_examples_with_the_clients_trace(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await ask(fleet, stream=True, traceparent=TRACEPARENT)
        await ask(fleet, traceparent=f"00-{'0' * 32}-b7ad6b7169203331-01")  # no trace's id
        await fleet.gateway.counted('kvgate_requests_total{operation="chat_completions",outcome="ok"}', 2)
        async with fleet.gateway.get("/metrics", accept=OPENMETRICS) as answer:
            assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
            read = list(openmetrics_families(await answer.text()))
        traced = {
            sample.name: sample.exemplar.labels for family in read for sample in family.samples if sample.exemplar
        }
        assert traced.keys() >= {"kvgate_request_seconds_bucket", "kvgate_first_byte_seconds_bucket"}
        assert all(labels == {"trace_id": TRACE} for labels in traced.values())


async def test_the_time_between_tokens_is_of_streams_that_tell_their_usage(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await ask(fleet)
        await ask(fleet, stream=True)
        name = 'kvgate_time_per_output_token_seconds_count{operation="chat_completions"}'
        await fleet.gateway.counted(name, 1)


async def test_the_event_loops_lag_is_sampled(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:

        async def sampled() -> bool:
            return await fleet.gateway.metric("kvgate_event_loop_lag_seconds_count") >= 2

        await eventually(sampled)
