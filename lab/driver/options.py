"""How to drive a target with a trace, and what to report of it: checked values, named as on the command line."""

import math
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvgate.failure import CommandError
from lab.driver.work import Lengths, Pace


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReplay:
    """The options as they were typed; None where one wasn't."""

    target: str | None
    model: str | None = None
    api_key: str | None = None
    metrics_key: str | None = None
    tokenizer: Path | None = None
    speed: float | None = None
    rate: float | None = None
    users: int | None = None
    think: float | None = None
    duration: float | None = None
    limit: int | None = None
    scale_length: float | None = None
    max_output: int | None = None
    leave_out_long: bool = False
    seed: int | None = None
    timeout: float | None = None
    slo_ttft: float | None = None
    slo_itl: float | None = None
    gpu_hour_usd: float | None = None
    instances: int | None = None
    out: Path | None = None

    def given(self) -> list[str]:
        """Return the options that were given, but for ``--target`` itself and what the environment may say."""
        names = [each for each in self.__dataclass_fields__ if each not in {"target", "api_key", "metrics_key"}]
        return [_option(each) for each in names if getattr(self, each) not in {None, False}]

    def check(self) -> None:
        """Raise ``CommandError`` for values and combinations that aren't allowed."""
        for name in ("speed", "rate", "duration", "scale_length", "timeout", "slo_ttft", "slo_itl", "gpu_hour_usd"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise CommandError(f"{_option(name)} {value}: a number above 0 is allowed")
        for name, least in (("users", 1), ("limit", 1), ("max_output", 1), ("instances", 1), ("think", 0), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise CommandError(f"{_option(name)} {value}: {least} or more is allowed")
        self._check_together()
        parts = urlsplit(self.target or "")
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise CommandError(f"--target {self.target}: an address like http://127.0.0.1:8000 is allowed")

    def _check_together(self) -> None:
        given = [_option(name) for name in ("speed", "rate", "users") if getattr(self, name) is not None]
        if len(given) > 1:
            raise CommandError(f"{' and '.join(given)}: give one of them")
        if self.think is not None and self.users is None:
            raise CommandError("--think is of --users: by the clock nobody waits")
        if self.instances is not None and self.gpu_hour_usd is None:
            raise CommandError("--instances says how many cost --gpu-hour-usd: give that too")

    @property
    def pace(self) -> Pace:
        return Pace(speed=self.speed or 1.0, rate=self.rate, users=self.users, think_s=self.think or 0.0)

    @property
    def lengths(self) -> Lengths:
        return Lengths(
            scale=self.scale_length or 1.0, most_output_tokens=self.max_output, leave_out_long=self.leave_out_long
        )

    def how(self, trace: Path, model: str) -> str:
        """Return one line that says what was asked of whom."""
        pace = self.pace
        if pace.users is not None:
            loop = f"{pace.users} users" + (f", {pace.think_s:g} s of thought" if pace.think_s else "")
        else:
            loop = f"{pace.rate:g} requests a second" if pace.rate else f"the trace's times x {pace.speed:g}"
        return f"{trace.name} at {self.target} ({model}), {loop}, lengths x {self.lengths.scale:g}"


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"
