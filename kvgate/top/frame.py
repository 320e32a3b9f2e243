"""What ``kvgate top`` shows of a moment, as lines that fit a terminal of any size; made for 80x24."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

from rich.text import Text

from kvgate.top.feed import Known

_ROLLING: Final = 5
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_OLD_S: Final = 8.0
_TIERS: Final = ("HBM", "DDR", "NVME")
_FAILED: Final = ("upstream_error", "gateway_error", "deadline", "refused", "shed")
_STATES: Final = {"healthy": "green", "starting": "yellow", "unhealthy": "bold red", "draining": "cyan"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """What bars and curves are drawn with."""

    curve: str
    full: str
    free: str
    dash: str
    dot: str


UNICODE: Final = Glyphs(curve="▁▂▃▄▅▆▇█", full="█", free="░", dash="-", dot="·")
ASCII: Final = Glyphs(curve="_.-=+*%#", full="#", free=".", dash="-", dot="|")


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """A terminal's size in characters, and what it can draw. ``height`` None is as many lines as it takes."""

    width: int
    height: int | None
    glyphs: Glyphs


def frame(known: Known, screen: Screen, *, name: str, now_s: float, footer: str = "") -> Text:
    """Return one picture, none of its lines longer than the screen is wide, and no more than it is high.

    When there is not enough room, instances and tenants are left out and counted.
    """
    status = known.status
    head = [_headline(status, screen, name), *_problem(known, now_s), *_curves(known, screen), Text()]
    tail = [Text(), *_policies(known, screen), *([Text(footer, style="dim")] if footer else [])]
    instances = [_instance_head(), *_titled(status["instances"], lambda each: _instance(each, screen))]
    tenants = [Text(), _tenant_head(), *_titled(status["tenants"], lambda each: _tenant(each, screen))]
    if screen.height is not None:
        lines_left = max(0, screen.height - len(head) - len(tail))
        wanted = (
            len(tenants)
            if len(instances) + len(tenants) <= lines_left
            else max(lines_left // 3, lines_left - len(instances))
        )
        tenants = _cut(tenants, min(wanted, len(tenants)), titles=2, what="tenants")
        instances = _cut(instances, lines_left - len(tenants), titles=1, what="instances")
    lines = [*head, *instances, *tenants, *tail]
    for line in lines:
        line.plain = _CONTROL.sub("?", line.plain)  # what an instance says is shown, not obeyed
        line.truncate(screen.width)
    return Text("\n").join(lines[: screen.height])


def _titled(rows: Sequence[Mapping[str, Any]], shown: Callable[[Mapping[str, Any]], Iterator[Text]]) -> list[Text]:
    return [line for each in rows for line in shown(each)] or [Text("none", style="dim")]


def _cut(lines: list[Text], lines_left: int, *, titles: int, what: str) -> list[Text]:
    """Leave out what there is no room for, and say so; a title alone is no use."""
    if len(lines) <= lines_left:
        return lines
    if lines_left < titles + 1:
        return []
    kept = lines[: lines_left - 1]
    return [*kept, Text(f"... {len(lines) - len(kept)} more lines of {what}: enlarge the window", style="dim")]


def _headline(status: Mapping[str, Any], screen: Screen, name: str) -> Text:
    all_of = len(status["instances"])
    usable = status["usable"]
    parts = [f"{usable} of {all_of} usable", f"routing {status['policy']}"]
    if worker := status["worker"]:
        parts.append(f"worker {worker['own'] + 1} of {worker['count']}")
    if status["open"]:
        parts.append("any key")
    text = Text(f"kvgate {name}", style="bold")
    text.append(f"  {f'  {screen.glyphs.dot}  '.join(parts)}", style="green" if 0 < usable == all_of else "yellow")
    return text


def _problem(known: Known, now_s: float) -> list[Text]:
    age_s = now_s - known.at_s
    if known.problem is not None:
        return [Text(f"{age_s:.0f} s old: {known.problem.message}", style="bold red")]
    return [] if age_s < _OLD_S else [Text(f"{age_s:.0f} s old: the gateway has not answered yet", style="bold red")]


def _curves(known: Known, screen: Screen) -> Iterator[Text]:
    intervals = known.intervals
    lines_left = max(0, screen.width - 46)
    last = intervals[-1] if intervals else None
    dash = screen.glyphs.dash

    def line(title: str, value: str, more: str, values: Sequence[float | None], top: float | None = None) -> Text:
        text = Text(f"{title:<16}")
        text.append(f"{value:>9} ", style="bold")
        text.append(f"{more:<19.19} ", style="dim")
        text.append(curve(values[-lines_left:] if lines_left else (), screen.glyphs, top=top), style="blue")
        return text

    per_s = [sum(each["outcomes"].values()) / each["span_s"] for each in intervals]
    failed = [sum(each["outcomes"].get(one, 0) for one in _FAILED) / each["span_s"] for each in intervals]
    yield line(
        "requests",
        f"{_mean(per_s[-_ROLLING:]):.1f}/s" if per_s else dash,
        f"failed {_mean(failed[-_ROLLING:]):.1f}/s" if failed else "",
        per_s,
    )
    medians = [each["ttft_p50_s"] for each in intervals]
    slowest = [each["ttft_p99_s"] for each in intervals]
    yield line("first token", _seconds(_latest(medians), dash), f"p99 {_seconds(_latest(slowest), dash)}", medians)
    found = [_share(intervals, place, "cached_tokens") for place in range(len(intervals))]
    expected = _share(intervals, len(intervals) - 1, "expected_tokens")
    yield line(
        "found in caches",
        _percent(found[-1] if found else None, dash),
        f"expected {_percent(expected, dash)}",
        found,
        top=1.0,
    )
    yield line(
        "at work",
        dash if last is None else str(last["in_flight"]),
        f"waiting {known.status['waiting']}",
        [each["in_flight"] for each in intervals],
    )


def _instance_head() -> Text:
    tiers = " ".join(f"{tier:<10}" for tier in _TIERS)
    return Text(f"{'instance':<14} {'state':<9} {'role':<7} {'here':>4} {'run':>4} {'wait':>4} {tiers}", style="dim")


def _instance(each: Mapping[str, Any], screen: Screen) -> Iterator[Text]:
    state = "draining" if each["draining"] else each["state"]
    text = Text(f"{each['id']:<14.14} ", style="bold")
    text.append(f"{state:<9.9} ", style=_STATES.get(state, ""))
    dash = screen.glyphs.dash
    running, waiting = (dash if each[name] is None else each[name] for name in ("running", "waiting"))
    role = each["role"] or dash  # not known before it was reached
    text.append(f"{role:<7.7} {each['in_flight']:>4} {running:>4} {waiting:>4}", style="not bold")
    for tier in _TIERS:
        text.append(f" {_tier(each['tiers'].get(tier), screen.glyphs):<10}", style="not bold")
    yield text
    if each["breaker"] != "closed":
        yield Text(f"  breaker {each['breaker']}: {each['breaker_reason']}", style="yellow")
    elif each["state"] != "healthy" and each["reason"]:
        yield Text(f"  {each['reason']}", style="red" if each["state"] == "unhealthy" else "yellow")


def _tier(held: Mapping[str, Any] | None, glyphs: Glyphs) -> str:
    if held is None or not held["capacity_blocks"]:
        return glyphs.dash
    share = min(1.0, held["used_blocks"] / held["capacity_blocks"])
    full = max(round(share * 5), 1) if share else 0
    return f"{glyphs.full * full}{glyphs.free * (5 - full)} {share * 100:.0f}%"


def _tenant_head() -> Text:
    return Text(f"{'tenant':<16} {'requests/min':<16} {'tokens/min':<20} {'at once':<11} class", style="dim")


def _tenant(each: Mapping[str, Any], screen: Screen) -> Iterator[Text]:
    used = each["usage"]
    dash = screen.glyphs.dash
    text = Text(f"{each['tenant']:<16.16} ", style="bold")
    for limit, name, width in (
        ("requests_per_min", "requests", 16),
        ("tokens_per_min", "tokens", 20),
        ("concurrency", "running", 11),
    ):
        most = each[limit]
        value = None if used is None or most is None else used[name]
        amount = dash if most is None else f"{'?' if value is None else value} of {most}"
        tone = "not bold"
        if value is not None and most:
            tone = "bold red" if value >= most else "yellow" if value >= 0.8 * most else "not bold green"
        text.append(f"{amount:<{width}.{width}} ", style=tone)
    text.append("suspended" if each["suspended"] else each["slo"], style="red" if each["suspended"] else "not bold")
    yield text
    if each["problem"]:
        yield Text(f"  {each['problem']}", style="red")


def _policies(known: Known, screen: Screen) -> Iterator[Text]:
    if known.shadows is None:
        yield Text(f"policies unknown: {known.shadows_problem or 'not read yet'}", style="yellow")
        return
    instances = known.shadows["instances"].values()
    running = sorted({each["in_charge"] for each in instances if each["in_charge"]})
    text = Text("eviction ", style="dim")
    text.append(", ".join(running) or "no instance reports its policies", style="bold" if running else "dim")
    text.append("   shadows ", style="dim")
    found = [
        f"{each['policy']} {_percent(each['hit_ratio'], screen.glyphs.dash)}" for each in known.shadows["candidates"]
    ]
    text.append(", ".join(found) or "no shadow policies")
    yield text


def curve(values: Sequence[float | None], glyphs: Glyphs, *, top: float | None = None) -> str:
    """Return a value a character, the highest (or ``top``) as the highest; a space where there is none."""
    most = top if top is not None else max((each for each in values if each is not None), default=0.0)
    steps = len(glyphs.curve) - 1
    return "".join(
        " " if each is None else glyphs.curve[min(steps, ceil(each / most * steps) if most > 0 else 0)]
        for each in values
    )


def _share(intervals: Sequence[Mapping[str, Any]], place: int, part: str) -> float | None:
    recent = intervals[max(0, place - _ROLLING + 1) : place + 1]
    known = sum(each["known_tokens"] for each in recent)
    return min(1.0, sum(each[part] for each in recent) / known) if known else None


def _latest(values: Sequence[float | None]) -> float | None:
    return next((each for each in reversed(values[-_ROLLING:]) if each is not None), None)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _seconds(value: float | None, dash: str) -> str:
    if value is None:
        return dash
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _percent(share: float | None, dash: str) -> str:
    return dash if share is None else f"{share * 100:.0f} %"
