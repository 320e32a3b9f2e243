"""Which requests are admitted: API keys to tenants, quotas, and admission slots at instances."""

from gateway.admission.authenticator import Authenticator
from gateway.admission.controller import AdmissionController, AdmissionMeter, QueueRules
from gateway.admission.credentials import keys_of
from gateway.admission.directory import Directory, DirectoryKeeper, KnownKey
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
from gateway.admission.slot import AdmissionRequest, AdmissionSlot
from gateway.admission.tenant_quotas import Held, TenantQuotas

__all__ = [
    "AdmissionController",
    "AdmissionMeter",
    "AdmissionRequest",
    "AdmissionSlot",
    "Authenticator",
    "ConcurrencyLimiter",
    "Demand",
    "Dimension",
    "Directory",
    "DirectoryKeeper",
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
