"""Who may enter now: keys to tenants, quotas, and turns."""

from gateway.admission.authenticator import Authenticator
from gateway.admission.controller import AdmissionController, AdmissionMeter, QueueRules
from gateway.admission.credentials import keys_of
from gateway.admission.directory import Directory, DirectoryKeeper, KnownKey
from gateway.admission.entry import Ask, Entry
from gateway.admission.fair_queue import FairQueue, Waiting
from gateway.admission.limiter import ConcurrencyLimiter
from gateway.admission.quota import (
    Demand,
    Dimension,
    Exceeded,
    Granted,
    LocalQuotaMeter,
    QuotaMeter,
    QuotaUnavailableError,
    QuotaUsage,
    Reservation,
    Standing,
)
from gateway.admission.tenant_quotas import Held, TenantQuotas

__all__ = [
    "AdmissionController",
    "AdmissionMeter",
    "Ask",
    "Authenticator",
    "ConcurrencyLimiter",
    "Demand",
    "Dimension",
    "Directory",
    "DirectoryKeeper",
    "Entry",
    "Exceeded",
    "FairQueue",
    "Granted",
    "Held",
    "KnownKey",
    "LocalQuotaMeter",
    "QueueRules",
    "QuotaMeter",
    "QuotaUnavailableError",
    "QuotaUsage",
    "Reservation",
    "Standing",
    "TenantQuotas",
    "Waiting",
    "keys_of",
]
