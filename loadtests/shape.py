"""How many users there are to be at a moment of a run."""

import math

from loadtests.scenario import Load

_TAU = 2 * math.pi


def users_at(load: Load, run_s: float) -> int | None:
    """Return the number of users ``run_s`` after the start, None when the run is over; at least one in between."""
    if run_s >= load.duration_s:
        return None
    if run_s < load.ramp_s:
        return max(1, round(load.users * run_s / load.ramp_s))
    since_s = run_s - load.ramp_s
    match load.shape:
        case "bursts":
            # A period begins with its quiet part.
            quiet = since_s % load.period_s < load.period_s - load.burst_s
            return load.users if quiet else load.peak
        case "diurnal":
            share = (1 - math.cos(_TAU * since_s / load.period_s)) / 2
            return round(load.users + (load.peak - load.users) * share)
        case _:
            return load.users


def spawned_per_s(load: Load) -> float:
    """Return how many users may come or go in a second: enough for the shape to be what it says."""
    most = max(load.users, load.peak)
    return max(1.0, most / max(load.ramp_s, 1.0), float(most) if load.shape == "bursts" else 1.0)
