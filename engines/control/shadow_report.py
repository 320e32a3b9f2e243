"""Shadow policies as ``/kv/v1/policy`` has them: asked for, and shown."""

from collections.abc import Sequence

from engines.events.publisher import RefusedError
from kvcontrol.core.policy_control import PolicyChange, ShadowBody, ShadowStandingBody
from kvcontrol.kv_policy import ShadowPolicies
from kvcontrol.kv_policy.spec import PolicySpec, parse_specs


def check_shadow(change: PolicyChange) -> None:
    """Raise ``RefusedError`` for what shadow policies don't have."""
    if change.params or change.tier is not None:
        raise RefusedError("shadow policies have no params and no tier: write mq(lifetime=2) in their names")


def shadows_of(candidates: str, *, capacity_blocks: int) -> ShadowPolicies:
    """Return shadow policies as they are written, which follow nothing yet; ``PolicyError`` for others."""
    choices: Sequence[PolicySpec] = parse_specs(candidates) if candidates.strip() else ()
    return ShadowPolicies(choices, capacity_blocks=capacity_blocks)


def shadow_body(shadow: ShadowPolicies) -> ShadowBody:
    """Return how the candidates stand."""
    report = shadow.report()
    return ShadowBody(
        standings=[
            ShadowStandingBody(
                policy=each.policy,
                lookups=each.lookups,
                hits=each.hits,
                hit_ratio=each.hits / each.lookups if each.lookups else None,
                window_hit_ratio=each.window_hit_ratio,
            )
            for each in report.standings
        ],
        window_s=report.window_s,
        sampled_ratio=report.sampled_ratio,
        requests=report.requests,
        skipped_requests=report.skipped_requests,
        busy_s=report.busy_s,
    )


__all__ = ["check_shadow", "shadow_body", "shadows_of"]
