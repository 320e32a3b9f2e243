"""What a run came to, in figures: latencies by hit class, what was attained, found, shed, lost, and what it cost."""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lab.driver.answer import Answer, Ending, HitClass
from lab.report import Cell, Grid, Host, Report

ALL = "all"
_HOUR_S = 3600.0
_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))
_LAG_TO_SAY_S = 0.05
_EVENTS_TOLERANCE = 0.05
"""By how much events may differ from tokens before pauses between events are none between tokens."""
_CHANCE_TOKENS = 16
"""Words at the beginning of a text that another may have in common with it by chance, generously."""
_NO_TIERS = "unknown: the gateway's own counts could not be read (--metrics-key?), or began anew meanwhile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Limits that a request has to keep: its time to the first token, and its mean time between tokens."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def kept(self, answer: Answer) -> bool:
        """Whether a request kept all of them; one without a whole answer keeps none."""
        return answer.ok and self.ttft_kept(answer) and self.itl_kept(answer)

    def ttft_kept(self, answer: Answer) -> bool:
        return answer.ok and (self.ttft_s is None or answer.ttft_s <= self.ttft_s)

    def itl_kept(self, answer: Answer) -> bool:
        return answer.ok and (self.itl_s is None or answer.tpot_s <= self.itl_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Dollars for an hour of one instance, and how many there are."""

    usd_per_hour: float
    instances: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a summary is of: how it was driven, and what isn't in the answers themselves.

    ``tier_tokens`` are what the gateway says that it found in each tier meanwhile, for all its clients; None where it
    was asked and couldn't say. ``template_tokens`` are those that every prompt begins with.
    """

    how: str
    block_tokens: int
    elapsed_s: float
    planned: int
    left_out: int
    open_loop: bool
    driver_cpu_s: float
    goals: Goals = field(default_factory=Goals)
    price: Price | None = None
    tier_tokens: Mapping[str, float] | None = field(default_factory=dict)
    template_tokens: int = 0


def summarize(answers: Sequence[Answer], setting: Setting) -> Report:
    """Return the report of a run. Interrupted requests are counted and are in nothing else."""
    judged = [each for each in answers if each.ending is not Ending.INTERRUPTED]
    grids = [_latencies(judged, setting), _classes(judged, setting)]
    if errors := _errors(judged):
        grids.append(errors)
    if instances := _instances(judged):
        grids.append(instances)
    if setting.tier_tokens:
        rows = tuple((tier.lower(), round(tokens)) for tier, tokens in setting.tier_tokens.items())
        grids.append(Grid(name="tiers", columns=("tier", "matched_tokens"), rows=rows))
    return Report(
        bench="replay",
        host=Host.here(),
        metrics=_metrics(answers, judged, setting),
        grids=tuple(grids),
        not_run={"tiers": _NO_TIERS} if setting.tier_tokens is None else {},
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value that ``share`` of an ordered sequence is at or below; it must not be empty."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def by_class(answers: Sequence[Answer], block_tokens: int) -> dict[HitClass, list[Answer]]:
    """Return the whole answers by hit class, every class being there."""
    found: dict[HitClass, list[Answer]] = {each: [] for each in HitClass}
    for answer in answers:
        if answer.ok:
            kind = HitClass.of(
                prompt_tokens=answer.prompt_tokens, cached_tokens=answer.cached_tokens, block_tokens=block_tokens
            )
            found[kind].append(answer)
    return found


def _metrics(answers: Sequence[Answer], judged: Sequence[Answer], setting: Setting) -> dict[str, float]:
    whole = [each for each in judged if each.ok]
    sent, elapsed_s = len(judged), setting.elapsed_s
    prompt = sum(each.prompt_tokens for each in whole)
    completion = sum(each.completion_tokens for each in whole)
    cached = sum(each.cached_tokens for each in whole)
    reusable = sum(each.reusable_tokens for each in whole)
    metrics: dict[str, float] = {
        "requests_planned_count": setting.planned,
        "requests_left_out_count": setting.left_out,
        "requests_sent_count": len(answers),
        "requests_ok_count": len(whole),
        "requests_interrupted_count": len(answers) - sent,
        "shed_ratio": _share(sum(each.ending is Ending.SHED for each in judged), sent),
        "failed_ratio": _share(sum(each.ending is Ending.FAILED for each in judged), sent),
        "elapsed_s": elapsed_s,
        "requests_per_s": _share(len(whole), elapsed_s),
        "prompt_tokens_per_s": _share(prompt, elapsed_s),
        "output_tokens_per_s": _share(completion, elapsed_s),
        "prompt_tokens": prompt,
        "output_tokens": completion,
        "cached_tokens": cached,
        "cached_ratio": _share(cached, prompt),
        "ceiling_ratio": _share(reusable, prompt),
        "cached_of_ceiling_ratio": _share(cached, reusable),
        "matched_tokens": sum(each.matched_tokens for each in whole),
        "short_answers_count": sum(each.is_short for each in whole),
        "answers_at_once_count": sum(each.came_at_once for each in whole),
        "events_per_token_ratio": events_per_token(whole),
        "prompts_as_planned_ratio": _share(
            sum(each.prompt_tokens == each.planned_tokens for each in whole), len(whole)
        ),
    }
    goals = setting.goals
    for name, limit, kept in (
        ("slo_ttft", goals.ttft_s, goals.ttft_kept),
        ("slo_itl", goals.itl_s, goals.itl_kept),
    ):
        if limit is not None:
            metrics[f"{name}_attained_ratio"] = _share(sum(map(kept, judged)), sent)
    if goals.ttft_s is not None or goals.itl_s is not None:
        good = sum(map(goals.kept, judged))
        metrics |= {"slo_attained_ratio": _share(good, sent), "goodput_requests_per_s": _share(good, elapsed_s)}
    if setting.price is not None:
        usd = setting.price.usd_per_hour * setting.price.instances * elapsed_s / _HOUR_S
        metrics |= {
            "instances_count": setting.price.instances,
            "cost_usd": usd,
            "cost_per_1000_requests_usd": _share(1000 * usd, len(whole)),
            "cost_per_million_output_tokens_usd": _share(1e6 * usd, completion),
        }
    lags = sorted(each.sent_s - each.due_s for each in answers if each.sent_s)
    if lags and setting.open_loop:
        metrics["driver_lag_p99_s"] = quantile(lags, 0.99)
    metrics["driver_cpu_s_per_request"] = _share(setting.driver_cpu_s, len(answers))
    return metrics


def _latencies(judged: Sequence[Answer], setting: Setting) -> Grid:
    classes: dict[str, list[Answer]] = {ALL: [each for each in judged if each.ok]}
    classes |= {str(kind): each for kind, each in by_class(judged, setting.block_tokens).items()}
    figures: tuple[tuple[str, Callable[[list[Answer]], Sequence[float]]], ...] = (
        ("ttft_ms", lambda some: [each.ttft_s for each in some]),
        ("tpot_ms", lambda some: [each.tpot_s for each in some if _has_tpot(each)]),
        ("itl_ms", _gaps),
        ("e2e_ms", lambda some: [each.e2e_s for each in some]),
    )
    rows: list[tuple[Cell, ...]] = []
    for name, values_of in figures:
        for kind, some in classes.items():
            ordered = sorted(values_of(some))
            if ordered:
                shown = (1000 * quantile(ordered, share) for _, share in _QUANTILES)
                rows.append((name, kind, len(some), 1000 * sum(ordered) / len(ordered), *shown))
    return Grid(
        name="latencies",
        columns=("figure", "class", "requests", "mean", *(name for name, _ in _QUANTILES)),
        rows=tuple(rows),
    )


def events_per_token(answers: Sequence[Answer]) -> float:
    """Return how many events came for each token of the usage; 0 where there was no token."""
    return _share(sum(each.events for each in answers), sum(each.completion_tokens for each in answers))


def _has_tpot(answer: Answer) -> bool:
    return answer.completion_tokens > 1 and not answer.came_at_once


def _gaps(answers: list[Answer]) -> Sequence[float]:
    every = array("f")
    for each in answers:
        every.extend(each.gaps_s)
    return every


def _classes(judged: Sequence[Answer], setting: Setting) -> Grid:
    goals = setting.goals
    rows: list[tuple[Cell, ...]] = []
    for kind, some in by_class(judged, setting.block_tokens).items():
        prompt = sum(each.prompt_tokens for each in some)
        cached = sum(each.cached_tokens for each in some)
        attained = _share(sum(map(goals.kept, some)), len(some)) if some and goals != Goals() else None
        rows.append((str(kind), len(some), prompt, cached, attained))
    return Grid(
        name="classes",
        columns=("class", "requests", "prompt_tokens", "cached_tokens", "slo_attained"),
        rows=tuple(rows),
    )


def _errors(judged: Sequence[Answer]) -> Grid | None:
    found = Counter((str(each.ending), each.why) for each in judged if not each.ok)
    if not found:
        return None
    rows = tuple((ending, why, count) for (ending, why), count in found.most_common())
    return Grid(name="errors", columns=("ending", "why", "requests"), rows=rows)


def _instances(judged: Sequence[Answer]) -> Grid | None:
    rows = tuple(_by_instance(judged))
    return (
        Grid(name="instances", columns=("instance", "requests", "prompt_tokens", "cached_tokens"), rows=rows)
        if rows
        else None
    )


def _by_instance(judged: Sequence[Answer]) -> Iterator[tuple[Cell, ...]]:
    for name in sorted({each.instance for each in judged if each.instance}):
        some = [each for each in judged if each.instance == name]
        yield name, len(some), sum(each.prompt_tokens for each in some), sum(each.cached_tokens for each in some)


def warnings(answers: Sequence[Answer], setting: Setting) -> Iterator[str]:
    """Yield what keeps a run's figures from meaning what they seem to."""
    lags = sorted(each.sent_s - each.due_s for each in answers if each.sent_s)
    if setting.open_loop and lags and quantile(lags, 0.99) > _LAG_TO_SAY_S:
        yield (
            f"the driver itself sent 1 % of the requests more than {1000 * quantile(lags, 0.99):.0f} ms late: "
            "its lateness is in the latencies"
        )
    whole = [each for each in answers if each.ok]
    others = sum(each.prompt_tokens != each.planned_tokens for each in whole)
    if others:
        yield f"{others} of {len(whole)} prompts had another number of tokens at the engine than was planned"
    yield from _token_warnings(whole)
    cached = sum(each.cached_tokens for each in whole)
    # Of all that was asked: in another order than the trace's, those without a whole answer are found by those before.
    ceiling = sum(each.reusable_tokens for each in answers)
    if cached > ceiling + len(whole) * (setting.template_tokens + _CHANCE_TOKENS):
        yield (
            f"engines found {cached:,} tokens in their caches, and of these requests alone a cache without bounds "
            f"would have {ceiling:,}: the target's wasn't empty at the beginning. After an earlier run with the same "
            "--seed another one makes all texts others"
        )
    if setting.tier_tokens is None:
        yield f"the tiers' tokens are {_NO_TIERS}"


def _token_warnings(whole: Sequence[Answer]) -> Iterator[str]:
    if short := sum(each.is_short for each in whole):
        asked, came = sum(each.asked_tokens for each in whole), sum(each.completion_tokens for each in whole)
        yield (
            f"{short} of {len(whole)} answers were shorter than asked for: {came:,} tokens of {asked:,}. The target "
            "did less work than the trace has: does it know ignore_eos?"
        )
    if at_once := sum(each.came_at_once for each in whole):
        yield (
            f"{at_once} of {len(whole)} answers came whole, at one moment: they are in no TPOT, and their ITL is 0. "
            "Does something on the way collect the stream?"
        )
    ratio = events_per_token(whole)
    if ratio and abs(ratio - 1) > _EVENTS_TOLERANCE:
        yield (
            f"the target sent {ratio:.2f} events for each token: ITL is between events. TPOT, by the tokens of the "
            "usage, can be compared"
        )
    one_more = sum(each.events == each.completion_tokens + 1 for each in whole)
    if whole and 2 * one_more > len(whole):
        yield (
            f"{one_more} of {len(whole)} answers have one event more than tokens: where the first event has no token, "
            "such as one with the role alone, TTFT ends too early and TPOT is too long"
        )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
