"""``python -m lab.calibrate.served REPORT TRACE``: fit what a served run alone shows: the front, and overlaps.

REPORT is what ``kvgate bench served --json`` printed, of the same trace, users, duration, blocks and DDR. Each
coefficient in turn is made larger and smaller, as long as the simulated run comes nearer to the measured one in the
mean of ``FIGURES``. Prints the coefficients as a profile has them, and each figure beside the measured one.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from engines.sim.profile import ProfileError, load_profile, shipped
from engines.sim.timing import TimeModel
from kvcontrol.kv_policy import DEFAULT_POLICY
from kvgate.failure import CommandError
from lab.simulate.outcome import FleetOutcome
from lab.simulate.study import Study
from lab.simulate.tier_size import times_hbm
from lab.traces import TraceError

COEFFICIENTS: Final = ("front_s", "front_token_s", "overlap_chunk", "overlap_decode")
FIGURES: Final = ("requests_per_s", "ttft_mean_ms", "ttft_p50_ms", "tpot_mean_ms", "itl_p50_ms")
_SHOWN: Final = (*FIGURES, "ttft_p90_ms", "ttft_p99_ms", "itl_p99_ms", "itl_max_ms")
_STEPS: Final = (2.0, 0.5, 1.25, 0.8)
_ROUNDS: Final = 2
_LEAST_GAIN: Final = 0.001


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(prog="python -m lab.calibrate.served", description=__doc__)
    made.add_argument("report", type=Path, help="what kvgate bench served --json printed")
    made.add_argument("trace", type=Path, help="the trace that was served")
    made.add_argument("--profile", required=True, help=f"{', '.join(shipped())}, or a file")
    made.add_argument("--subject", default="ours", help="whose figures; default: ours")
    made.add_argument("--users", type=int, default=6, help="default: 6")
    made.add_argument("--duration", type=float, default=90.0, help="seconds; default: 90")
    made.add_argument("--limit", type=int, default=400, help="requests of the trace that are used; default: 400")
    made.add_argument("--kv-blocks", type=int, default=0, help="default: the profile's")
    made.add_argument("--ddr", default="0", help="host memory of the engine, like 40GiB; default: 0")
    made.add_argument("--policy", default=DEFAULT_POLICY, help=f"default: {DEFAULT_POLICY}")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Fit and print; 2, with a message, for a report, trace or profile that can't be used."""
    chosen = parser().parse_args(arguments)
    try:
        measured = read_figures(chosen.report, chosen.subject)
        profile = load_profile(chosen.profile)
        shape = replace(profile.engine, hbm_blocks=chosen.kv_blocks or profile.engine.hbm_blocks)
        study = Study(
            trace=chosen.trace,
            profile=profile,
            instances=1,
            routers=("cost_aware",),
            limit=chosen.limit,
            ddr=times_hbm(chosen.ddr, "--ddr", shape),
            users=chosen.users,
            duration=chosen.duration,
            kv_blocks=chosen.kv_blocks,
            policy=chosen.policy,
        )
        workload = study.workload()
    except (CommandError, ProfileError, TraceError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2

    def run(time: TimeModel) -> FleetOutcome:
        return replace(study, profile=replace(profile, time=time)).run("cost_aware", workload)

    found = fit_served(profile.time, measured, run)
    seen = figures_of(run(found))
    lines = ["[time]", *(f"{name} = {getattr(found, name):.4g}" for name in COEFFICIENTS), ""]
    for name in _SHOWN:
        if name in measured and name in seen:
            off = seen[name] / measured[name] - 1
            lines.append(f"# {name}: simulated {seen[name]:.4g}, measured {measured[name]:.4g}, {off:+.1%}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def read_figures(report: Path, subject: str) -> dict[str, float]:
    """Return a subject's figures by name; raises ``ValueError`` for what is no report of served runs, ``OSError``."""
    said = json.loads(report.read_text(encoding="utf-8"))
    tables = said.values() if isinstance(said, dict) else ()
    for table in tables:
        if isinstance(table, list) and table and isinstance(table[0], dict) and {"figure", subject} <= table[0].keys():
            found = {str(row["figure"]): row[subject] for row in table}
            return {name: float(value) for name, value in found.items() if isinstance(value, int | float) and value > 0}
    raise ValueError(f"{report}: no table of figures with {subject!r}; kvgate bench served --json prints one")


def figures_of(outcome: FleetOutcome) -> dict[str, float]:
    """Return a simulated run's figures under the names of ``kvgate bench served``, those that there are."""
    found = {
        "requests_per_s": outcome.requests_per_s,
        "ttft_mean_ms": _ms(outcome.ttft_mean_s),
        "ttft_p50_ms": _ms(outcome.ttft(0.5)),
        "ttft_p90_ms": _ms(outcome.ttft(0.9)),
        "ttft_p99_ms": _ms(outcome.ttft(0.99)),
        "tpot_mean_ms": outcome.tpot_mean_ms,
        "itl_p50_ms": outcome.itl_ms(0.5),
        "itl_p99_ms": outcome.itl_ms(0.99),
        "itl_max_ms": outcome.itl_ms(1.0),
    }
    return {name: value for name, value in found.items() if value is not None}


def fit_served(time: TimeModel, measured: Mapping[str, float], run: Callable[[TimeModel], FleetOutcome]) -> TimeModel:
    """Return the model with the coefficients that bring a simulated run nearest to a measured one."""

    def off(model: TimeModel) -> float:
        seen = figures_of(run(model))
        errors = [abs(seen.get(name, 0.0) / measured[name] - 1) for name in FIGURES if name in measured]
        return sum(errors) / max(1, len(errors))

    best_off = off(time)
    for _ in range(_ROUNDS):
        for name in COEFFICIENTS:
            for step in _STEPS:
                tried = _moved(time, name, step)
                while tried != time and (tried_off := off(tried)) < best_off - _LEAST_GAIN:
                    time, best_off = tried, tried_off
                    tried = _moved(time, name, step)
    return time


def _moved(time: TimeModel, name: str, step: float) -> TimeModel:
    """Return the model with one coefficient so many times as large; of a factor ``f`` the part ``f - 1`` is scaled."""
    value = getattr(time, name)
    if name.startswith("overlap"):
        return replace(time, **{name: 1 + max(value - 1, 0.1) * step})
    return replace(time, **{name: value * step})


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


if __name__ == "__main__":
    sys.exit(main())
