"""An OpenAI-like engine on a real loopback socket that does what a request's ``x-script`` header tells it.

The header is JSON with the fields of ``Script``. Without one the engine answers like LMDeploy: a few tokens, usage with
``cached_tokens`` out of its scripted cache, KV events, ``/kv/v1``.
"""

import asyncio
import contextlib
import gzip
import json
import time
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
from aiohttp import web

from engines.control.errors import StaleFenceError
from engines.control.fences import Fences
from kvcontrol.core import BlockHash, CacheIdentity, CacheTier
from kvcontrol.core.control import CACHE_SALT_HEADER, InstanceStats, LoadStats, PrefixCacheStats, TierStats
from kvcontrol.core.pd import PD_HEADER, Fetch, Hold, PdStats, Ticket, parse_pd_header
from kvcontrol.core.policy_control import PolicyChange
from kvcontrol.core.prefix_control import (
    INVALIDATE_PATH,
    PIN_PATH,
    PREFIXES_PATH,
    UNPIN_PATH,
    InvalidateRequest,
    Invalidation,
    Pin,
    PinRequest,
    Pins,
    UnpinRequest,
)
from kvcontrol.core.roles import EngineRole, KVTransport
from kvcontrol.core.tier_control import QUOTAS_PATH, QuotaChange
from tests.support.scripted_cache import ScriptedCache
from tests.support.serving import serving

MODEL = "scripted"
IDENTITY = CacheIdentity(model=MODEL, revision="r1", kv_dtype="float32", block_size_tokens=16)
CORS = {"access-control-allow-origin": "*", "access-control-allow-credentials": "true"}
"""LMDeploy's server allows every page to read its answers."""
Encode = Callable[[Sequence[dict[str, Any]]], Sequence[int]]


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What one request is to experience."""

    status: int = 200
    error: str = "lmdeploy"  # shape of an error body: lmdeploy, openai, detail, html
    error_code: int = 500  # of an error event
    error_text: str = ""  # an error's message instead of the usual one
    retry_after: str | None = None
    location: str | None = None  # of a redirection
    ttft_s: float = 0.0
    head_s: float = 0.0  # between a stream's head and its first event
    head_only: bool = False  # drop the connection behind a stream's head
    chunks: int = 4
    chunk_s: float = 0.0
    text: str = "tok"
    die_after: int | None = None  # drop the connection after so many chunks; 0 before any byte
    stall_after: int | None = None  # say nothing more after so many chunks
    no_done: bool = False
    hold_open: bool = False  # the stream's connection stays open behind its end
    split: int | None = None  # bytes per TCP write
    crlf: bool = False
    no_space: bool = False
    gzip: bool = False
    error_event: bool = False


class ScriptedEngine:
    """State and counters of one engine; ``started`` runs it."""

    def __init__(self, *, kv: bool = True, encode: Encode | None = None, model: str = MODEL) -> None:
        self.kv = kv
        self.model = model
        self.encode = encode
        self.healthy = True
        self.stats_failures = 0  # so many requests for stats are answered with 503
        self.silent = False  # health checks get no answer
        self.health_gate: asyncio.Event | None = None  # health checks are answered once it is set
        self.stats_changes: dict[str, dict[str, Any]] = {}  # what the stats say instead, by section
        self.snapshot_fails = False
        self.snapshot_changes: dict[str, Any] = {}  # what the snapshot says instead
        self.cache: ScriptedCache | None = None
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.targets: list[str] = []  # path and query of each request, as they came
        self.active = self.aborted = 0
        self.tiers: dict[CacheTier, TierStats] = {}
        self.quotas: dict[tuple[str, str], Any] = {}  # as the gateway told them, by tenant and tier
        self.quota_unit_bytes = 1  # bursts are rounded down to whole ones
        self.quotas_told = self.quotas_asked = self.stats_asked = 0
        self.policies: dict[str, dict[str, Any]] = {"eviction": {"kind": "eviction", "name": "lru", "params": {}}}
        self.available: dict[str, str] = {}
        self.strategies: dict[str, str] = {}
        self.refused_policies: set[str] = set()
        self.frozen: list[PolicyChange] | None = None  # what came since it was stopped, read and not answered
        self.fences: Fences | None = Fences()  # None as in an engine of an earlier version
        self.first: dict[str, dict[str, Any]] = {}  # the policies of its start, by kind that was changed
        self.policy_status: int | None = None  # answered to PUT /kv/v1/policy instead
        self.policy_gate: asyncio.Event | None = None  # changes of a policy are answered once it is set
        self.policies_asked = self.resets = 0
        self.busy_for = 0  # so many changes of a policy are answered with 503
        self.told: list[str] = []  # policies by name, in order
        self.reset_gate: asyncio.Event | None = None  # resets are answered once it is set
        self.knows_prefixes = True
        self.pins: dict[str, PinRequest] = {}  # by the last hash
        self.most_pinned_blocks = 1000
        self.pins_told = 0
        self.pins_hang = False
        self.extra_card: dict[str, Any] = {}
        self.more_models: list[str] = []
        self.default = Script()
        self.gate: asyncio.Event | None = None  # requests are answered once it is set
        self.role = EngineRole.HYBRID
        self.transports: dict[KVTransport, str] = {}
        self.held_at = ""  # where a prefill instance says that held prompts are fetched
        self.held: set[Ticket] = set()  # prompts that it keeps for others
        self.hold_lease_s = 60.0
        self.fetches_from: ScriptedEngine | None = None
        self.fetch_gate: asyncio.Event | None = None  # prompts are fetched once it is set
        self.url = ""

    async def reply(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.bodies.append(body)
        self.targets.append(request.raw_path)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        said = json.loads(body)
        self.requests.append(said)
        raw = request.headers.get("x-script")
        script = self.default if raw is None else msgspec.json.decode(raw, type=Script)
        self.active += 1
        try:
            return await self._play(request, said, script)
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted += 1
            raise
        finally:
            self.active -= 1

    async def _play(self, request: web.Request, said: dict[str, Any], script: Script) -> web.StreamResponse:
        await asyncio.sleep(script.ttft_s)
        if self.gate is not None:
            await self.gate.wait()
        if script.die_after == 0:
            _drop(request)
            return web.Response()
        if script.status >= 300:
            return _failure(script)
        tokens = self._tokens(said)
        await self._hand_over(request)
        salt = request.headers.get(CACHE_SALT_HEADER, "")
        cached = 0
        if self.cache is not None and tokens:
            cached = self.cache.find(tokens, salt)
            await self.cache.store(tokens, salt)
        usage = {
            "prompt_tokens": len(tokens) or 7,
            "completion_tokens": script.chunks,
            "total_tokens": (len(tokens) or 7) + script.chunks,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if said.get("stream"):
            return await self._stream(request, said, script, usage)
        answer = _whole(request.path, self.model, script, usage)
        data = json.dumps(answer, ensure_ascii=False).encode()
        if script.gzip:
            return web.Response(
                body=gzip.compress(data), headers={"content-encoding": "gzip"}, content_type="application/json"
            )
        if script.die_after is not None:
            response = web.StreamResponse(
                headers={"content-type": "application/json", "content-length": str(len(data))}
            )
            await response.prepare(request)
            await response.write(data[: len(data) // 2])
            _drop(request)
            return response
        return web.Response(body=data, content_type="application/json", headers={"x-engine-note": "kept", **CORS})

    async def _hand_over(self, request: web.Request) -> None:
        """Do what a separated request needs: keep its prompt, until it is fetched or its lease ends, or fetch it."""
        match parse_pd_header(request.headers[PD_HEADER]) if PD_HEADER in request.headers else None:
            case Hold(ticket=ticket):
                self.held.add(ticket)
                asyncio.get_running_loop().call_later(self.hold_lease_s, self.held.discard, ticket)
            case Fetch(ticket=ticket):
                if self.fetch_gate is not None:
                    await self.fetch_gate.wait()
                if self.fetches_from is not None:
                    self.fetches_from.held.discard(ticket)
            case _:
                pass

    async def _stream(
        self, request: web.Request, said: dict[str, Any], script: Script, usage: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8", **CORS})
        if script.gzip:
            response.headers["content-encoding"] = "gzip"
        compressor = zlib.compressobj(wbits=31)
        await response.prepare(request)
        await asyncio.sleep(script.head_s)
        for number, plain in enumerate(events(request.path, self.model, said, script, usage)):
            event = plain
            if script.die_after == number or script.head_only:
                _drop(request)
                return response
            if script.stall_after == number:
                await asyncio.sleep(3600)
            size = script.split or len(event)
            if script.gzip:
                event = compressor.compress(event) + compressor.flush(zlib.Z_SYNC_FLUSH)
                size = len(event)
            for start in range(0, len(event), size):
                await response.write(event[start : start + size])
                if script.split:
                    await asyncio.sleep(0)
            await asyncio.sleep(script.chunk_s)
        if script.gzip:
            await response.write(compressor.flush())
        if script.hold_open:
            await asyncio.sleep(3600)
        await response.write_eof()
        return response

    def _tokens(self, said: dict[str, Any]) -> list[int]:
        prompt = said.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return prompt
        if "messages" in said and self.encode is not None:
            return list(self.encode(said["messages"]))
        return []

    async def health(self, request: web.Request) -> web.Response:
        del request
        if self.silent:
            await asyncio.sleep(3600)
        if self.health_gate is not None:
            await self.health_gate.wait()
        return web.json_response(
            {"status": "healthy" if self.healthy else "unhealthy"}, status=200 if self.healthy else 503
        )

    async def models(self, request: web.Request) -> web.Response:
        del request
        card = {"id": self.model, "object": "model", "created": 1, "owned_by": "lmdeploy", "max_model_len": 8192}
        more = [card | {"id": each} for each in self.more_models]
        return web.json_response({"object": "list", "data": [card | self.extra_card, *more]})

    async def stats(self, request: web.Request) -> web.Response:
        del request
        self.stats_asked += 1
        if self.cache is None:
            raise web.HTTPNotFound
        if self.stats_failures > 0:
            self.stats_failures -= 1
            raise web.HTTPServiceUnavailable
        stats = InstanceStats(
            epoch=self.cache.epoch,
            engine="scripted",
            engine_version="1",
            device="cpu",
            started_at_s=time.time(),
            context_length_tokens=8192,
            identity=self.cache.identity,
            events=self.cache.events,
            tiers=self.tiers,
            load=LoadStats(running=self.active, waiting=0, max_batch_size=512),
            prefix_cache=PrefixCacheStats(query_tokens=0, hit_tokens=0),
            role=self.role,
            transports=self.transports,
            pd=PdStats(endpoint=self.held_at) if self.held_at else None,
        )
        said = msgspec.to_builtins(stats)
        for section, fields in self.stats_changes.items():
            said[section] = (said[section] or {}) | fields
        return web.Response(body=msgspec.json.encode(said), content_type="application/json")

    async def snapshot(self, request: web.Request) -> web.Response:
        del request
        if self.snapshot_fails:
            raise web.HTTPServiceUnavailable
        if self.cache is None:
            raise web.HTTPNotFound
        said = msgspec.to_builtins(self.cache.snapshot()) | self.snapshot_changes
        return web.Response(body=msgspec.json.encode(said), content_type="application/json")

    async def put_quota(self, request: web.Request) -> web.Response:
        said = msgspec.json.decode(await request.read(), type=QuotaChange)
        if said.tier not in {CacheTier.DDR, CacheTier.NVME}:
            return web.json_response({"error": {"message": f"unknown tier {said.tier}"}}, status=400)
        self.quotas_told += 1
        if said.quota is None:
            self.quotas.pop((said.tenant, said.tier), None)
        else:
            quota = self.quotas[said.tenant, said.tier] = msgspec.to_builtins(said.quota)
            if quota["burst_bytes"] is not None:
                quota["burst_bytes"] -= quota["burst_bytes"] % self.quota_unit_bytes
        return web.json_response(self._quotas())

    async def get_quotas(self, request: web.Request) -> web.Response:
        del request
        self.quotas_asked += 1
        return web.json_response(self._quotas())

    def _quotas(self) -> dict[str, Any]:
        used = {"used_blocks": 0, "used_bytes": 0, "over_burst_blocks": 0, "changed": True}
        tiers: dict[str, dict[str, Any]] = {}
        for (tenant, tier), quota in self.quotas.items():
            tiers.setdefault(tier, {})[tenant] = {**used, "quota": quota}
        return {"tiers": tiers}

    def freeze(self) -> None:
        """Answer no change of a policy, and after one nothing about policies, as if the process were stopped."""
        self.frozen = []

    def thaw(self) -> None:
        """Do all that came meanwhile, the last of it first, though nobody waits for it any more."""
        came, self.frozen = self.frozen or [], None
        for each in reversed(came):
            with suppress(StaleFenceError):
                self._change_policy(each)

    def _change_policy(self, said: PolicyChange) -> None:
        """Raise ``StaleFenceError`` for a change that is older than one that came before."""
        if said.fence is not None and self.fences is not None:
            self.fences.accept(said.kind, said.fence)
        self.told.append(said.name)
        if (before := self.policies.get(said.kind)) is not None:
            self.first.setdefault(said.kind, before)
        self.policies[said.kind] = {"kind": said.kind, "name": said.name, "params": said.params}

    async def get_policies(self, request: web.Request) -> web.Response:
        del request
        self.policies_asked += 1
        if self.frozen:
            await asyncio.sleep(3600)
        if self.policy_status is not None:
            return web.json_response({"error": {"message": "scripted"}}, status=self.policy_status)
        said = {"policies": list(self.policies.values()), "available": self.available, "strategies": self.strategies}
        if self.fences is not None:
            said |= {"fences": self.fences.report(), "first": self.first}
        return web.json_response(said)

    async def put_policy(self, request: web.Request) -> web.Response:
        said = msgspec.json.decode(await request.read(), type=PolicyChange)
        if said.fence is not None and self.fences is None:
            return web.json_response({"error": {"message": "unknown field fence"}}, status=400)
        if self.frozen is not None:
            self.frozen.append(said)
            await asyncio.sleep(3600)
        if self.policy_gate is not None:
            await self.policy_gate.wait()
        if self.busy_for:
            self.busy_for -= 1
            return web.json_response({"error": {"message": "busy"}}, status=503)
        if said.name in self.refused_policies:
            self.told.append(said.name)
            return web.json_response({"error": {"message": f"{said.name} is not for me"}}, status=400)
        try:
            self._change_policy(said)
        except StaleFenceError as error:
            return web.json_response({"error": {"message": str(error)}}, status=409)
        return web.json_response(self.policies[said.kind])

    async def reset(self, request: web.Request) -> web.Response:
        del request
        self.resets += 1
        if self.reset_gate is not None:
            await self.reset_gate.wait()
        return web.json_response({"dropped": {"HBM": 3, "DDR": 1}})

    async def get_pins(self, request: web.Request) -> web.Response:
        del request
        if not self.knows_prefixes:
            raise web.HTTPNotFound
        shown = Pins(
            pins=[self._pin(each) for each in self.pins.values()],
            pinned_blocks=len({key for each in self.pins.values() for key in each.hashes}),
            limit_blocks=self.most_pinned_blocks,
            limited_by="the script",
            errors=0,
        )
        return web.Response(body=msgspec.json.encode(shown), content_type="application/json")

    async def put_pin(self, request: web.Request) -> web.Response:
        if not self.knows_prefixes:
            raise web.HTTPNotFound
        said = msgspec.json.decode(await request.read(), type=PinRequest)
        self.pins_told += 1
        if self.pins_hang:
            await asyncio.sleep(3600)
        if len(said.hashes) > self.most_pinned_blocks:
            return web.json_response({"error": {"message": f"at most {self.most_pinned_blocks} may be"}}, status=400)
        self.pins[said.hashes[-1]] = said
        return web.Response(body=msgspec.json.encode(self._pin(said)), content_type="application/json")

    def _pin(self, said: PinRequest) -> Pin:
        held = self.cache.resident if self.cache is not None else {}
        here = sum(bytes.fromhex(each) in held for each in said.hashes)
        return Pin(
            hash=said.hashes[-1],
            blocks=len(said.hashes),
            tokens=16 * len(said.hashes),
            tiers={CacheTier.HBM: here} if here else {},
            missing=len(said.hashes) - here,
            left_s=said.ttl_s,
        )

    async def unpin(self, request: web.Request) -> web.Response:
        said = msgspec.json.decode(await request.read(), type=UnpinRequest)
        return web.json_response({"unpinned": self.pins.pop(said.hash, None) is not None})

    async def invalidate(self, request: web.Request) -> web.Response:
        if not self.knows_prefixes:
            raise web.HTTPNotFound
        said = msgspec.json.decode(await request.read(), type=InvalidateRequest)
        ended = [name for name, each in self.pins.items() if not set(said.hashes).isdisjoint(each.hashes)]
        for name in ended:
            del self.pins[name]
        dropped = []
        if self.cache is not None:
            dropped = self.cache.with_what_follows([BlockHash(bytes.fromhex(each)) for each in said.hashes])
            if dropped:
                await self.cache.remove(dropped)
        done = Invalidation(dropped={CacheTier.HBM: len(dropped)}, in_use_blocks=0, unpinned=ended)
        return web.Response(body=msgspec.json.encode(done), content_type="application/json")

    @asynccontextmanager
    async def started(self, port: int = 0) -> AsyncIterator["ScriptedEngine"]:
        """Listen while the block runs; a second start on the same port is a restart with an empty cache."""
        if self.kv:
            self.cache = ScriptedCache(IDENTITY)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self.reply)
        app.router.add_post("/v1/completions", self.reply)
        app.router.add_post("/v1/messages", self.reply)
        app.router.add_post("/v1/responses", self.reply)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.router.add_get("/kv/v1/stats", self.stats)
        app.router.add_get("/kv/v1/snapshot", self.snapshot)
        app.router.add_get(QUOTAS_PATH, self.get_quotas)
        app.router.add_put(QUOTAS_PATH, self.put_quota)
        app.router.add_get("/kv/v1/policy", self.get_policies)
        app.router.add_put("/kv/v1/policy", self.put_policy)
        app.router.add_post("/kv/v1/prefix-cache/reset", self.reset)
        app.router.add_get(PREFIXES_PATH, self.get_pins)
        app.router.add_post(PIN_PATH, self.put_pin)
        app.router.add_post(UNPIN_PATH, self.unpin)
        app.router.add_post(INVALIDATE_PATH, self.invalidate)
        try:
            async with serving(app, port) as self.url:
                yield self
        finally:
            if self.cache is not None:
                await self.cache.close()
                self.cache = None

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


def events(path: str, model: str, said: dict[str, Any], script: Script, usage: dict[str, Any]) -> list[bytes]:
    """The stream's events as LMDeploy writes them."""
    asked = bool((said.get("stream_options") or {}).get("include_usage"))
    end = "\r\n\r\n" if script.crlf else "\n\n"
    lead = "data:" if script.no_space else "data: "

    def event(data: object) -> bytes:
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
        return f"{lead}{text}{end}".encode()

    def chunk(choices: list[Any], tokens: dict[str, Any] | None) -> dict[str, Any]:
        data: dict[str, Any] = {"id": "cmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model}
        data["choices"] = choices
        if asked:
            data["usage"] = tokens
        return data

    out = []
    for number in range(script.chunks):
        reason = "stop" if number == script.chunks - 1 else None
        word = f"{script.text}{number}"
        choice = {"index": 0, "finish_reason": reason}
        choice |= {"delta": {"role": "assistant", "content": word}} if "chat" in path else {"text": word}
        out.append(event(chunk([choice], None)))
    if script.error_event:
        out.append(
            event(
                {
                    "error": {
                        "message": script.error_text or "engine broke",
                        "type": "server_error",
                        "code": script.error_code,
                        "object": "error",
                    }
                }
            )
        )
    elif asked:
        out.append(event(chunk([], usage)))
    if not script.no_done:
        out.append(event("[DONE]"))
    return out


def _whole(path: str, model: str, script: Script, usage: dict[str, Any]) -> dict[str, Any]:
    text = "".join(f"{script.text}{number}" for number in range(script.chunks))
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    choice |= {"message": {"role": "assistant", "content": text}} if "chat" in path else {"text": text}
    kind = "chat.completion" if "chat" in path else "text_completion"
    return {"id": "cmpl-1", "object": kind, "created": 1, "model": model, "choices": [choice], "usage": usage}


def _failure(script: Script) -> web.Response:
    headers = {} if script.retry_after is None else {"retry-after": script.retry_after}
    if script.location is not None:
        headers["location"] = script.location
    message = script.error_text or f"scripted {script.status}"
    match script.error:
        case "openai":
            data: Any = {"error": {"message": message, "type": "t", "param": None, "code": "c"}}
        case "detail":
            data = {"detail": [{"type": "missing", "loc": ["body", "messages"], "msg": "Field required"}]}
        case "html":
            return web.Response(text="<h1>no</h1>", status=script.status, content_type="text/html", headers=headers)
        case _:
            data = {"message": message, "type": "engine_said", "code": script.status, "param": None, "object": "error"}
    return web.json_response(data, status=script.status, headers=headers)


def _drop(request: web.Request) -> None:
    if request.transport is not None:
        with contextlib.suppress(OSError):
            request.transport.abort()


__all__ = ["IDENTITY", "MODEL", "Script", "ScriptedEngine", "events"]
