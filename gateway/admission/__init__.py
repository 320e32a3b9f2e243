"""Which requests are admitted: API keys to tenants, quotas, and admission slots at instances."""

from gateway.admission.authenticator import Authenticator
from gateway.admission.controller import AdmissionController, QueueRules
from gateway.admission.credentials import keys_of
from gateway.admission.directory import Directory, DirectoryKeeper
from gateway.admission.fair_queue import FairQueue, Waiting
from gateway.admission.limiter import ConcurrencyLimiter
from gateway.admission.quota import LocalQuotaMeter, QuotaMeter, QuotaUnavailableError
from gateway.admission.slot import AdmissionRequest, AdmissionSlot
from gateway.admission.tenant_quotas import Held

__all__ = [
    "AdmissionController",
    "AdmissionRequest",
    "AdmissionSlot",
    "Authenticator",
    "ConcurrencyLimiter",
    "Directory",
    "DirectoryKeeper",
    "FairQueue",
    "Held",
    "LocalQuotaMeter",
    "QueueRules",
    "QuotaMeter",
    "QuotaUnavailableError",
    "Waiting",
    "keys_of",
]
