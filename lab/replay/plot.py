"""Curves of a replay: the share of prompt tokens found, by policy, over the size of the cache. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from kvgate.failure import CommandError
from lab.files import write_picture
from lab.replay.hits import HitRates
from lab.replay.sweep import MIN, SweepRow

_SIZE_INCHES = (9.0, 5.5)
_DOTS_PER_INCH = 120


def draw(rows: Sequence[SweepRow], *, ceiling: HitRates, title: str, file: Path) -> None:
    """Write a picture in the format that the file's name ends in; raises ``CommandError`` when it can't be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, PercentFormatter, StrMethodFormatter

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for policy in dict.fromkeys(row.policy for row in rows):
        points = sorted((row.capacity_blocks, row.rates.token) for row in rows if row.policy == policy)
        bound = policy == MIN
        axes.plot(
            [capacity for capacity, _ in points],
            [share for _, share in points],
            label="min (knows the future)" if bound else policy,
            color="black" if bound else None,
            linestyle="--" if bound else "-",
            marker=None if bound else "o",
            markersize=4,
        )
    axes.axhline(ceiling.token, color="grey", linestyle=":", label="room for everything")
    axes.set_xscale("log")
    axes.set_xticks(sorted({row.capacity_blocks for row in rows}))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params("x", rotation=45)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("blocks in the cache")
    axes.set_ylabel("prompt tokens found")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    try:
        write_picture(figure, file)
    except OSError as error:
        raise CommandError(f"--plot {file}: {error.strerror or error}") from error
