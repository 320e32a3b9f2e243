"""``/admin/v1/explain``: where would this prompt go now, and why. Asking changes nothing."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field, StringConstraints

from gateway.admission import Authenticator
from gateway.api.admin.prompts import PromptBody, check_model, check_one, fingerprint_of
from gateway.api.admin.routes import admin_routes
from gateway.errors import InvalidRequestError
from gateway.fingerprint import Fingerprint, Fingerprinter, Gap
from gateway.fingerprint.fingerprint import KnownBlocks
from gateway.placement.planner import Plan, Planner
from gateway.placement.separation import RequestSize
from gateway.registry import BreakerState, Instance, InstanceState, Registry
from gateway.routing.scoring import predicted_wait_s
from gateway.state.bodies import NAME_PATTERN
from gateway.types import TenantId
from kvcontrol.core.ids import BlockHash
from kvcontrol.core.roles import EngineRole
from kvcontrol.scheduler_ir import render

_MOST_HASHES = 10_000

Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{2,128}$")]


class ExplainBody(PromptBody):
    """A prompt in one of its forms, or the hashes of its blocks in order."""

    hashes: list[Hash] | None = Field(None, max_length=_MOST_HASHES)
    session: str | None = Field(None, max_length=512, description="What x-session-id would be.")


class SpeedView(BaseModel):
    """Speeds that the costs were reckoned with."""

    prefill_tokens_per_s: float
    decode_load_s: float
    base_s: float
    answer_s: float
    reload_s_per_token: dict[str, float]


class CandidateView(BaseModel):
    """One candidate instance, and the cost of the request there."""

    instance: str
    chosen: bool
    matched_tokens: int
    tokens_by_tier: dict[str, int]
    expected_tokens: int
    in_flight: int
    prefill_tokens: int
    passed_tokens: int
    foreign_requests: int
    slots: int
    recent_tokens: float
    measured: SpeedView | None
    cost_s: dict[str, float] = Field(description="Named terms in seconds; empty where the policy has none.")
    total_s: float | None
    predicted_ttft_s: float | None


class LeftOutView(BaseModel):
    """One instance that could not take it, and why."""

    instance: str
    why: str


class SeparationView(BaseModel):
    """Where the prompt would be computed, and why."""

    prefill: str = Field(description="The instance that would compute it.")
    reason: str
    transport: str | None
    uncached_tokens: int | None


class Explanation(BaseModel):
    """Where the prompt would go now, and why."""

    policy: str
    instance: str | None
    basis: str | None
    reason: str
    fingerprint: str = Field(description="What the prompt is known by: tokens, text, hashes, or none.")
    prompt_tokens: int | None
    matched_tokens: int
    uncached_tokens: int
    predicted_ttft_s: float | None
    plan: str | None = Field(description="What would be done, step by step; null where no instance can take it.")
    separation: SeparationView | None = Field(description="Null where no instance computes prompts for others.")
    candidates: list[CandidateView]
    left_out: list[LeftOutView]


def explain_router(
    *,
    registry: Registry,
    planner: Planner,
    fingerprinter: Fingerprinter,
    authenticator: Authenticator,
    expected_output_tokens: int,
) -> APIRouter:
    """Return the routes; answers are taken for ``expected_output_tokens`` long."""
    router = admin_routes("routing")

    async def explained(body: ExplainBody) -> Explanation:
        check_model(body, registry)
        fingerprint = await _fingerprint(body, registry, fingerprinter, authenticator.salt(TenantId(body.tenant)))
        usable = registry.available.usable(body.model)
        left_out = [_left_out(each, registry, body.model) for each in registry.all() if each not in usable]
        session = None if body.session is None else body.session.encode()
        size = RequestSize(
            request_id="explained",
            prompt_tokens=fingerprint.tokens if isinstance(fingerprint, Fingerprint) else 0,
            max_tokens=expected_output_tokens,
            separable=True,
        )
        plan = planner.consider(fingerprint, usable, session=session, size=size) if usable else None
        return _explanation(planner.policy, fingerprint, plan, left_out)

    @router.get("/explain")
    async def get_explain(
        model: Annotated[str, Query(min_length=1, max_length=512)],
        prompt: Annotated[str | None, Query(description="Text, as for /v1/completions.")] = None,
        block_hash: Annotated[
            list[Hash] | None, Query(alias="hash", description="Blocks in order, as hex; may be repeated.")
        ] = None,
        tenant: Annotated[str, Query(pattern=NAME_PATTERN)] = "anonymous",
        session: Annotated[str | None, Query(max_length=512)] = None,
    ) -> Explanation:
        """For a text or for block hashes."""
        return await explained(
            ExplainBody(model=model, prompt=prompt, hashes=block_hash, tenant=tenant, session=session)
        )

    @router.post("/explain")
    async def post_explain(body: ExplainBody) -> Explanation:
        """For a prompt too long for an address, a conversation, token ids, or block hashes."""
        return await explained(body)

    return router


async def _fingerprint(
    body: ExplainBody, registry: Registry, fingerprinter: Fingerprinter, salt: str
) -> Fingerprint | Gap:
    check_one(body, "hashes")
    if body.hashes is not None:
        sizes = [each.stats.identity.block_size_tokens for each in registry.all() if each.stats is not None]
        hashes = [BlockHash(bytes.fromhex(each)) for each in body.hashes if len(each) % 2 == 0]
        if len(hashes) != len(body.hashes):
            raise InvalidRequestError("hashes: a hash has an even number of hex digits", param="hashes")
        return KnownBlocks(hashes, model=body.model, block_size_tokens=max(sizes, default=1))
    return await fingerprint_of(body, fingerprinter, salt)


def _left_out(instance: Instance, registry: Registry, model: str) -> LeftOutView:
    if instance.state is not InstanceState.HEALTHY:
        why = f"{instance.state}: {instance.reason}"
    elif instance.stands_in:
        why = "a prefill instance answers only if no other instance can"
    elif instance.role is EngineRole.PREFILL:
        why = "it computes prompts for others and answers nothing itself"
    elif instance.draining:
        why = "it is draining"
    elif not instance.serves(model):
        why = f"it doesn't serve {model!r}"
    elif registry.breakers.state(instance.id) is not BreakerState.CLOSED:
        why = f"its breaker is {registry.breakers.state(instance.id)}: {registry.breakers.reason(instance.id)}"
    else:
        why = "it has become usable just now"
    return LeftOutView(instance=instance.id, why=why)


def _explanation(
    policy: str, fingerprint: Fingerprint | Gap, plan: Plan | None, left_out: list[LeftOutView]
) -> Explanation:
    if isinstance(fingerprint, Gap):
        kind, tokens = "none", None
    else:
        kind = "text" if fingerprint.textual else "hashes" if isinstance(fingerprint, KnownBlocks) else "tokens"
        tokens = fingerprint.tokens
    if plan is None:
        return Explanation(
            policy=policy,
            instance=None,
            basis=None,
            reason="no instance can take it",
            fingerprint=kind,
            prompt_tokens=tokens,
            matched_tokens=0,
            uncached_tokens=tokens or 0,
            predicted_ttft_s=None,
            plan=None,
            separation=None,
            candidates=[],
            left_out=left_out,
        )
    return Explanation(
        policy=plan.policy,
        instance=plan.instance.id,
        basis=plan.decision.basis,
        reason=plan.decision.reason,
        fingerprint=kind,
        prompt_tokens=tokens,
        matched_tokens=plan.matched_tokens,
        uncached_tokens=plan.uncached_tokens,
        predicted_ttft_s=plan.predicted_s,
        plan=render(plan.execution.ir_graph),
        separation=_separation(plan),
        candidates=_candidates(plan),
        left_out=left_out,
    )


def _separation(plan: Plan) -> SeparationView | None:
    if plan.split is None:
        return None
    handover = plan.split.placement.handover
    return SeparationView(
        prefill=plan.split.placement.prefill,
        reason=plan.split.reason,
        transport=None if handover is None else handover.transport,
        uncached_tokens=plan.split.uncached_tokens,
    )


def _candidates(plan: Plan) -> list[CandidateView]:
    views = []
    for each in plan.candidates:
        terms = plan.decision.cost_s.get(each.instance, {})
        speeds = each.speeds
        views.append(
            CandidateView(
                instance=each.instance,
                chosen=each.instance == plan.instance.id,
                matched_tokens=each.matched_tokens,
                tokens_by_tier={str(tier): tokens for tier, tokens in each.tokens_by_tier.items()},
                expected_tokens=each.expected_tokens,
                in_flight=each.in_flight,
                prefill_tokens=each.prefill_tokens,
                passed_tokens=each.passed_tokens,
                foreign_requests=each.foreign_requests,
                slots=each.slots,
                recent_tokens=each.recent_tokens,
                measured=None
                if speeds is None
                else SpeedView(
                    prefill_tokens_per_s=speeds.prefill_tokens_per_s,
                    decode_load_s=speeds.decode_load_s,
                    base_s=speeds.base_s,
                    answer_s=speeds.answer_s,
                    reload_s_per_token={str(tier): each for tier, each in speeds.reload_s_per_token.items()},
                ),
                cost_s=dict(terms),
                total_s=sum(terms.values()) if terms else None,
                predicted_ttft_s=predicted_wait_s(terms) if terms else None,
            )
        )
    return views
