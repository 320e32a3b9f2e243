"""Shadow policies in any engine: selected, reported, and run between steps."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from engines.control.errors import RefusedError
from kvcontrol.core.policy_control import PolicyChange, ShadowBody, ShadowStandingBody
from kvcontrol.kv_policy import ShadowPolicies
from kvcontrol.kv_policy.spec import PolicySpec, parse_specs

_WORK_EVERY_S: Final = 0.02
"""Between two chunks of work while some waits; one takes 2 ms at most, for a prompt of 100,000 tokens."""
_LOOK_EVERY_S: Final = 0.25


class ShadowTimer:
    """Calls ``work`` from the engine's loop, sooner while it returns that more waits. The loop's thread."""

    def __init__(self, work: Callable[[], bool]) -> None:
        self._work = work
        self._timer: asyncio.TimerHandle | None = None

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Work whenever the loop is free, until ``close``."""
        self.close()
        self._timer = loop.call_later(_WORK_EVERY_S if self._work() else _LOOK_EVERY_S, self.follow, loop)

    def close(self) -> None:
        """Work no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def check_shadow(change: PolicyChange) -> None:
    """Raise ``RefusedError`` for parameters that shadow policies don't have."""
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
