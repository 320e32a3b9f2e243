"""The lab's commands as ``kvgate`` lists them: a summary each; calling one imports its module."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def bench() -> "typer.Typer":
    """Benchmarks on this machine."""
    from lab.bench.command import build_bench

    return build_bench()


def conformance() -> Callable[..., None]:
    """Test a gateway from outside: bodies, errors, streams, hostile bytes, load, failures."""
    from lab.conformance.command import conformance as command

    return command


def plan() -> Callable[..., None]:
    """Find the smallest simulated fleet that keeps an SLO, for each kind of instance, and the cheapest of them."""
    from lab.plan.command import plan as command

    return command


def replay() -> Callable[..., None]:
    """Replay a trace: through eviction policies, side by side, or over HTTP through a running gateway (--url)."""
    from lab.replay.command import replay as command

    return command


def simulate() -> Callable[..., None]:
    """Serve a trace with a simulated fleet: times to the first token, hits, hot spots and shed requests."""
    from lab.simulate.command import simulate as command

    return command
