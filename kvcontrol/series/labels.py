"""Every label of the catalogue, and what bounds its values: no label ever takes what a client wrote."""

from typing import Final

OTHER: Final = "other"
"""What an unknown model or tenant is called."""

MOST_TENANTS: Final = 100
"""So many tenants have series of their own at a gateway, and in a tier of an engine; the rest is ``OTHER``."""

MOST_MODELS: Final = 100
"""So many models have series of their own at a gateway; the rest is ``OTHER``."""

LABELS: Final[dict[str, str]] = {
    "basis": "what decided: `prefix`, `learned`, `load` and so on; a fixed set of the routing policies",
    "cause": "a status (`status_503`) or a kind of failure; a fixed set",
    "instance": "an instance's id; its series go when it does",
    "kind": "a fixed set, see the series",
    "kv_tenant": "a tenant as engines know it: a digest of its salt",
    "loop": "a background loop of the gateway; a fixed set",
    "model": (
        f"a model that an instance serves, at most {MOST_MODELS} of them, and gone when none does; `{OTHER}` for any "
        "other name"
    ),
    "operation": "an inference route at the gateway; `save`, `load`, `prefetch` or `demote` at an engine",
    "outcome": "how it ended; a fixed set",
    "pace": "a pace that ships with kvgate",
    "path": "`hbm_to_ddr`, `ddr_to_hbm`, `ddr_to_nvme`, `nvme_to_ddr`",
    "policy": "a policy that ships with kvgate, with its parameters as they were set",
    "priority": "`high`, `normal` or `low`",
    "process": "`api_server` or `engine`",
    "quantity": "`load` or `compute`",
    "quota": "`requests_per_min`, `tokens_per_min`, `concurrency` or `context_tokens`",
    "reason": "why; a fixed set",
    "stage": "`receive`, `parse`, `fingerprint`, `admission` or `plan`",
    "state": "a fixed set, one of them 1",
    "status": "how a transfer ended; a fixed set",
    "strategy": "a strategy that ships with kvgate, or `lmdeploy`",
    "tenant": (
        f"at the gateway a tenant that has a key or an entry, `anonymous`, or `{OTHER}` (for a tenant of that name, "
        "too); at an engine the digest that `kvgate_tenant_info` joins with its name, `shared` for requests without a "
        f"tenant, or `{OTHER}`: at most {MOST_TENANTS} of each"
    ),
    "tier": "`HBM`, `DDR`, `NVME`, `REMOTE`",
    "verdict": "`worth`, `not_worth` or `declined`",
    "version": "of kvgate",
    "worker": "the number of one of several gateway processes on a host, on every series; absent where there is one",
}

__all__ = ["LABELS", "MOST_MODELS", "MOST_TENANTS", "OTHER"]
