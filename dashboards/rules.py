"""The recording and alert rules, read from their file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml

RULES_FILE: Final = Path(__file__).parent / "prometheus" / "rules.yml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """``name`` is the recorded series or the alert; ``lasting`` how long its expression must find something."""

    name: str
    group: str
    expr: str
    alert: bool
    lasting: str = "0s"
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def runbook(self) -> str:
        """Page and section that say what an alert means and what to do."""
        return self.annotations.get("runbook", "")


def load_rules(path: Path = RULES_FILE) -> tuple[Rule, ...]:
    """Return all rules of a file, in its order."""
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return tuple(
        Rule(
            name=each.get("alert") or each["record"],
            group=group["name"],
            expr=each["expr"],
            alert="alert" in each,
            lasting=each.get("for", "0s"),
            labels=each.get("labels", {}),
            annotations=each.get("annotations", {}),
        )
        for group in groups
        for each in group["rules"]
    )
