"""The one place where what can't be simulated becomes a command's refusal."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engines.sim.profile import ProfileError
from kvcontrol.kv_policy import PolicyError
from kvgate.failure import CommandError
from lab.traces import TraceError


@contextmanager
def refusals(trace: Path) -> Iterator[None]:
    """Raise ``CommandError`` for a trace, a profile or a setting that can't be used."""
    try:
        yield
    except (ProfileError, TraceError, PolicyError, ValueError) as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"can't read {error.filename or trace}: {error.strerror or error}") from error
