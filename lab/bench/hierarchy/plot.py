"""Pictures of ``kvgate bench hierarchy``: where prompts came from, and how that went on over the trace."""

from collections.abc import Sequence
from pathlib import Path

from kvgate.failure import CommandError
from lab.bench.hierarchy.report import Case
from lab.files import write_picture

_SIZE_INCHES = (11.0, 4.8)
_DOTS_PER_INCH = 110
_SMOOTHED = 3
"""Windows that a point of the course is the mean of."""
_COLORS = {"HBM": "#2b6cb0", "DDR": "#4fb286", "NVMe": "#c9a227", "computed again": "#c53030", "new": "#cbd5e0"}


def draw(cases: Sequence[Case], folder: Path) -> list[Path]:
    """Write ``hierarchy-TRACE.png`` for each trace, of its first policy; raises ``CommandError`` where that fails."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    written = []
    for trace in dict.fromkeys(case.trace for case in cases):
        mine = [case for case in cases if case.trace == trace]
        mine = [case for case in mine if case.policy == mine[0].policy]
        figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(figure)
        bars, course = figure.subplots(1, 2, width_ratios=(1, 1.3))
        left = [0.0] * len(mine)
        for part, color in _COLORS.items():
            shares = [_shares(case)[part] for case in mine]
            bars.barh(range(len(mine)), shares, left=left, color=color, label=part)
            left = [before + share for before, share in zip(left, shares, strict=True)]
        bars.set_yticks(range(len(mine)), [_label(case) for case in mine], fontsize="small")
        bars.invert_yaxis()
        bars.xaxis.set_major_formatter(PercentFormatter(1.0))
        bars.set_xlabel("of all prompt tokens")
        bars.legend(fontsize="x-small", ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.15))
        for case in mine:
            windows = case.served.course
            rates = [
                sum(each.found for each in near) / (sum(each.prompt for each in near) or 1)
                for near in (windows[max(0, place - _SMOOTHED + 1) : place + 1] for place in range(len(windows)))
            ]
            course.plot([100 * (place + 1) for place in range(len(windows))], rates, label=_label(case))
        course.yaxis.set_major_formatter(PercentFormatter(1.0))
        course.set_ylim(bottom=0)
        course.set_xlabel("requests served")
        course.set_ylabel("prompt tokens found, lately")
        course.grid(alpha=0.3)
        course.legend(fontsize="x-small")
        figure.suptitle(f"{trace}: prompts through the tiers, {mine[0].policy}")
        file = folder / f"hierarchy-{trace}.png"
        try:
            write_picture(figure, file)
        except OSError as error:
            raise CommandError(f"--plot {folder}: {error.strerror or error}") from error
        written.append(file)
    return written


def _shares(case: Case) -> dict[str, float]:
    total = case.served.total
    prompt = total.prompt or 1
    parts = {"HBM": total.hbm, "DDR": total.ddr, "NVMe": total.nvme, "computed again": total.again}
    shares = {name: part / prompt for name, part in parts.items()}
    return shares | {"new": 1 - sum(shares.values())}


def _label(case: Case) -> str:
    sizes = case.sizes
    parts = [f"HBM {sizes.hbm:,}"]
    parts += [f"DDR {sizes.ddr:,}"] if sizes.ddr else []
    parts += [f"NVMe {sizes.nvme:,}"] if sizes.nvme else []
    return "\n+ ".join(parts)
