"""What a check of ``kvgate doctor`` says."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """``WARN`` runs all the same."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check saw; ``advice`` is empty where there is nothing to do."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""


def is_fit(findings: Sequence[Finding]) -> bool:
    """Tell whether nothing stands in the way."""
    return all(finding.verdict is not Verdict.FAIL for finding in findings)
