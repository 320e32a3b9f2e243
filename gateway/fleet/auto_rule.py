"""When a fleet swaps its eviction policy by itself, and when it swaps back.

    settled ── one candidate ahead for HOLD_PERIODS in a row ─▶ swap ─▶ on probation
    on probation ── the policy before is ahead, of periods since then alone ─▶ undo: the candidate is barred
    on probation ── the dwell time without that ─▶ settled

Between two swaps for gain lies the dwell time at least. What an operator puts in charge is left alone for as long, and
so is the fleet when instances refused a swap. A pure function of the evidence and the time: the caller carries out what
is decided and calls ``swapped`` or ``refused``.
"""

from dataclasses import dataclass
from typing import Final

from gateway.fleet.evidence import Lead, ShadowEvidence, Verdict

HOLD_PERIODS: Final = 10
"""So often in a row a candidate must be ahead."""
_BARRED_DWELLS: Final = 24
"""Dwell times for which a candidate that was swapped back is not tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Put ``policy`` in charge instead of ``instead_of``; ``undo`` is whether it was in charge before."""

    policy: str
    instead_of: str
    lead: Lead
    undo: bool

    @property
    def reason(self) -> str:
        """Why, in one sentence for the log and the audit entry."""
        lead = self.lead
        found = f"found {lead.lead:+.1%} of look-ups more than {self.instead_of} (noise {lead.noise:.2%})"
        how = "since the swap" if self.undo else "as a shadow policy"
        return f"{self.policy} {found} {how}, in {lead.periods} periods"


class AutoRule:
    """See the module's text. Times are of one clock, in seconds."""

    def __init__(self, *, dwell_s: float) -> None:
        self._dwell_s = dwell_s
        self._in_charge: str | None = None
        self._since_s = self._rest_until_s = 0.0
        self._before: str | None = None
        """The policy before the swap on probation."""
        self._leader: str | None = None
        self._held = 0
        self._barred: dict[str, float] = {}

    def decide(self, now_s: float, in_charge: str, evidence: ShadowEvidence) -> Decision | None:
        """Return the swap that the evidence asks for now; called once a period."""
        if in_charge != self._in_charge:
            self._began(now_s, in_charge, before=None)
        if now_s < self._rest_until_s:
            return None
        if self._before is not None:
            if (undo := self._undo(now_s, in_charge, evidence)) is not None:
                return undo
            if now_s - self._since_s >= self._dwell_s:
                self._before = None
        leader = next(
            (
                each
                for each in evidence.leads(in_charge)
                if each.verdict is Verdict.AHEAD and self._barred.get(each.policy, now_s) <= now_s
            ),
            None,
        )
        name = None if leader is None else leader.policy
        self._held = self._held + 1 if name == self._leader else 1
        self._leader = name
        if leader is None or self._held < HOLD_PERIODS or now_s - self._since_s < self._dwell_s:
            return None
        return Decision(policy=leader.policy, instead_of=in_charge, lead=leader, undo=False)

    def swapped(self, now_s: float, decision: Decision) -> None:
        """Note that a decision was carried out."""
        if decision.undo:
            self._barred[decision.instead_of] = now_s + _BARRED_DWELLS * self._dwell_s
        self._began(now_s, decision.policy, before=None if decision.undo else decision.instead_of)

    def refused(self, now_s: float) -> None:
        """Note that a decision could not be carried out: none is made for the dwell time."""
        self._rest_until_s = now_s + self._dwell_s

    def _undo(self, now_s: float, in_charge: str, evidence: ShadowEvidence) -> Decision | None:
        leads = evidence.leads(in_charge, since_s=self._since_s)
        lead = next((each for each in leads if each.policy == self._before), None)
        if lead is None or lead.verdict is not Verdict.AHEAD or now_s <= self._since_s:
            return None
        return Decision(policy=lead.policy, instead_of=in_charge, lead=lead, undo=True)

    def _began(self, now_s: float, in_charge: str, *, before: str | None) -> None:
        self._in_charge, self._since_s, self._before = in_charge, now_s, before
        self._leader, self._held = None, 0
