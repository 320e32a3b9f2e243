"""The coefficients of a ``TimeModel`` out of what was measured, and how far the model is from it.

Each time is linear in the coefficients, so they are the solution of a least-squares problem of relative errors, with
none below 0 (one that would be is left out, and the rest fitted again: with so few of them that is exact enough).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np

from engines.sim.profile import Measured, MeasuredDecode, MeasuredPrefill, Profile, ProfileError
from engines.sim.timing import TimeModel

PREFILL: Final = ("step_s", "token_s", "pair_s", "context_s")
DECODE: Final = ("decode_step_s", "sequence_s", "decode_context_s")
_DIGITS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """|model - measured| / measured, over all measurements of a kind."""

    measurements: int
    mean: float
    worst: float


def fit(measured: Measured, *, max_prefill_tokens: int) -> TimeModel:
    """Return the model that is nearest to what was measured; raises ``ProfileError`` where too little was."""
    for name in measured.fixed:
        if name not in (*PREFILL, *DECODE):
            raise ProfileError(f"measured.fixed has no {name!r}; allowed are {', '.join((*PREFILL, *DECODE))}")
    prefill = [_prefill_row(each, max_prefill_tokens) for each in measured.prefill]
    decode = [_decode_row(each) for each in measured.decode]
    values = _solve("prefill", PREFILL, prefill, [each.seconds for each in measured.prefill], measured.fixed)
    values |= _solve("decode", DECODE, decode, [each.seconds for each in measured.decode], measured.fixed)
    return TimeModel(**{name: float(f"{value:.{_DIGITS}g}") for name, value in values.items()})


def refit(profile: Profile) -> TimeModel:
    """Return a profile's time model with the coefficients of its own measurements; what isn't fitted to them stays."""
    fitted = fit(profile.measured, max_prefill_tokens=profile.engine.max_prefill_tokens)
    return replace(profile.time, **{name: getattr(fitted, name) for name in (*PREFILL, *DECODE)})


def errors(model: TimeModel, measured: Measured, *, max_prefill_tokens: int) -> dict[str, FitError]:
    """Return how far a model is from what was measured, for ``prefill`` and ``decode``."""
    said = asdict(model)
    found = {}
    for kind, names, rows, seconds in (
        (
            "prefill",
            PREFILL,
            [_prefill_row(each, max_prefill_tokens) for each in measured.prefill],
            [each.seconds for each in measured.prefill],
        ),
        ("decode", DECODE, [_decode_row(each) for each in measured.decode], [each.seconds for each in measured.decode]),
    ):
        off = [
            abs(sum(said[name] * value for name, value in zip(names, row, strict=True)) - each) / each
            for row, each in zip(rows, seconds, strict=True)
        ]
        found[kind] = FitError(
            measurements=len(off), mean=sum(off) / len(off) if off else 0.0, worst=max(off, default=0.0)
        )
    return found


def profile_errors(profile: Profile) -> dict[str, FitError]:
    """Return how far a profile's own coefficients are from its own measurements."""
    return errors(profile.time, profile.measured, max_prefill_tokens=profile.engine.max_prefill_tokens)


def _prefill_row(each: MeasuredPrefill, most_tokens: int) -> list[float]:
    steps, tokens, pairs, contexts = 0, 0, 0.0, 0
    left, context = each.tokens - each.cached, each.cached
    while left > 0:
        chunk = min(left, most_tokens)
        steps += 1
        tokens += chunk
        pairs += chunk * (context + chunk / 2)
        contexts += context
        left -= chunk
        context += chunk
    return [steps, tokens, pairs, contexts]


def _decode_row(each: MeasuredDecode) -> list[float]:
    return [1, each.batch, each.batch * each.context]


def _solve(
    kind: str,
    names: Sequence[str],
    rows: Sequence[Sequence[float]],
    seconds: Sequence[float],
    fixed: Mapping[str, float],
) -> dict[str, float]:
    free = [name for name in names if name not in fixed]
    if len(rows) < len(free):
        raise ProfileError(f"{len(rows)} measurements of {kind} for {len(free)} coefficients; there must be as many")
    matrix, wanted = np.asarray(rows, dtype=float).reshape(len(rows), len(names)), np.asarray(seconds, dtype=float)
    if (wanted <= 0).any():
        raise ProfileError(f"a measurement of {kind} took no time; seconds must be > 0")
    left = wanted - sum((matrix[:, names.index(name)] * value for name, value in fixed.items() if name in names), 0.0)
    found = dict.fromkeys(names, 0.0) | {name: value for name, value in fixed.items() if name in names}
    while free:
        scaled = matrix[:, [names.index(name) for name in free]] / wanted[:, None]
        # Columns differ by ten orders of magnitude: without this the smallest would drown in the tolerance.
        scale = np.abs(scaled).max(axis=0)
        scale[scale == 0] = 1.0
        values = np.linalg.lstsq(scaled / scale, left / wanted, rcond=None)[0] / scale
        if (values >= 0).all():
            return found | dict(zip(free, map(float, values), strict=True))
        free.pop(int(np.argmin(values * scale)))
    return found
