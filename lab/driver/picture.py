"""A run as one picture: latencies by hit class, and how it went over time. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvgate.failure import CommandError
from lab.driver.answer import Answer, Ending
from lab.driver.summary import Setting, by_class
from lab.files import write_picture

_SIZE_INCHES = (12.0, 8.0)
_DOTS_PER_INCH = 110
_INTERVALS = 120
_COLOURS = {"miss": "#c2410c", "partial": "#b7950b", "full": "#15803d"}


def draw(answers: Sequence[Answer], setting: Setting, *, file: Path) -> None:
    """Write the picture in the format that the file's name ends in; raises ``CommandError`` when it can't be."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    first, gaps, time_to_first, rates = figure.subplots(2, 2).flat
    classes = by_class(answers, setting.block_tokens)
    for kind, some in classes.items():
        look = {"label": f"{kind} ({len(some)})", "color": _COLOURS[str(kind)]}
        _curve(first, [each.ttft_s for each in some], look)
        _curve(gaps, [gap for each in some for gap in each.gaps_s], look)
        time_to_first.plot([each.due_s for each in some], [each.ttft_s for each in some], ".", markersize=3, **look)
    for axes, title, limit_s in (
        (first, "time to the first token", setting.goals.ttft_s),
        (gaps, "time between token events", setting.goals.itl_s),
    ):
        axes.set(title=title, xlabel="seconds", ylabel="share of them at or below", ylim=(0, 1.02))
        if limit_s is not None:
            axes.axvline(limit_s, color="black", linestyle="--", linewidth=1, label="goal")
    time_to_first.set(title="first token over time", xlabel="due, seconds from the start", ylabel="seconds")
    _over_time(rates, answers)
    for axes in (first, gaps, time_to_first, rates):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.suptitle(setting.how)
    try:
        write_picture(figure, file)
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror or error}") from error


def _curve(axes: Any, values: Sequence[float], look: dict[str, str]) -> None:
    if not values:
        return
    ordered = sorted(values)
    axes.plot(ordered, [(place + 1) / len(ordered) for place in range(len(ordered))], **look)
    if ordered[0] > 0:
        axes.set_xscale("log")


def _over_time(axes: Any, answers: Sequence[Answer]) -> None:
    axes.set(title="requests over time", xlabel="seconds from the start", ylabel="requests a second")
    end_s = max((each.ended_s for each in answers), default=0.0)
    if end_s <= 0:
        return
    width_s = end_s / _INTERVALS
    middles = [(place + 0.5) * width_s for place in range(_INTERVALS)]
    for name, times, colour in (
        ("due", [each.due_s for each in answers], "#9ca3af"),
        ("ok", [each.ended_s for each in answers if each.ok], "#15803d"),
        ("shed", [each.ended_s for each in answers if each.ending is Ending.SHED], "#b7950b"),
        ("failed", [each.ended_s for each in answers if each.ending is Ending.FAILED], "#b91c1c"),
    ):
        counts = [0] * _INTERVALS
        for at_s in times:
            counts[min(int(at_s / width_s), _INTERVALS - 1)] += 1
        if times:
            axes.plot(middles, [count / width_s for count in counts], label=name, color=colour)
