"""The recording and alert rules, read from their file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

RULES_FILE: Final = Path(__file__).parent / "prometheus" / "rules.yml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """``name`` is the recorded series or the alert."""

    name: str
    expr: str
    alert: bool
    summary: str = ""
    runbook: str = ""
    """Page and section that say what an alert means and what to do."""


def load_rules(path: Path = RULES_FILE) -> tuple[Rule, ...]:
    """Return all rules of a file, in its order."""
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return tuple(
        Rule(
            name=each.get("alert") or each["record"],
            expr=each["expr"],
            alert="alert" in each,
            summary=each.get("annotations", {}).get("summary", ""),
            runbook=each.get("annotations", {}).get("runbook", ""),
        )
        for group in groups
        for each in group["rules"]
    )


__all__ = ["RULES_FILE", "Rule", "load_rules"]
