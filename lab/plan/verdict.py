"""Whether a live run kept the goals that its fleet was chosen by."""

from collections.abc import Sequence
from math import inf, isinf

from lab.driver.answer import Answer
from lab.plan.slo import ANSWERED, Goal, Slo
from lab.report import Cell, Grid
from lab.simulate.outcome import FleetOutcome, quantile


def goals_grid(slo: Slo, before: FleetOutcome, answers: Sequence[Answer]) -> Grid:
    """Return each goal with what is allowed, what was predicted and what was seen, and whether that keeps it. Whoever
    got no whole answer waited for ever, as in a plan; pauses are those between pieces of text.
    """
    whole = [each for each in answers if each.ok]
    ttft_s = [*sorted(each.ttft_s for each in whole), *[inf] * (len(answers) - len(whole))]
    gaps_s = sorted(gap_s for each in whole for gap_s in each.gaps_s)
    rows: list[tuple[Cell, ...]] = []
    for goal in slo.goals:
        seen_s = quantile(gaps_s if goal.figure == "itl" else ttft_s, goal.share)
        met = bool(whole) and (seen_s is None or seen_s <= goal.limit_s)
        rows.append(
            (f"{goal.name}_s", goal.limit_s, _finite(_predicted_s(goal, before)), _finite(seen_s), _word(met=met))
        )
    answered = len(whole) / len(answers) if answers else 0.0
    met = answered >= slo.attainment
    rows.append((f"{ANSWERED}_ratio", slo.attainment, before.answered_rate, answered, _word(met=met)))
    return Grid(name="goals, live", columns=("goal", "allowed", "predicted", "live", "met"), rows=tuple(rows))


def _predicted_s(goal: Goal, before: FleetOutcome) -> float | None:
    return None if goal.figure == "itl" and not before.gaps.total else goal.seen_s(before)


def _finite(seconds: float | None) -> float | None:
    return None if seconds is None or isinf(seconds) else seconds


def _word(*, met: bool) -> str:
    return "yes" if met else "no"
