"""Timing of short calls: each one alone, garbage collection off, quantiles over all of them."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector out of what is timed; what it would find stays where it is until then."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def each_s(calls: Sequence[T], work: Callable[[T], object], *, warm_up: int = 50) -> list[float]:
    """Return how long ``work`` took for each argument, sorted; the first ``warm_up`` of them run untimed before."""
    clock = time.perf_counter
    for argument in calls[:warm_up]:
        work(argument)
    took = []
    with no_collection():
        for argument in calls:
            started = clock()
            work(argument)
            took.append(clock() - started)
    return sorted(took)


def quantile(sorted_s: Sequence[float], q: float) -> float:
    """Return the q-quantile of sorted values (nearest rank)."""
    return sorted_s[min(len(sorted_s) - 1, int(q * len(sorted_s)))]
