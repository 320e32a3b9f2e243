"""Every label of the catalogue, and what bounds its values: no label ever takes what a client wrote."""

from typing import Final

OTHER: Final = "other"
"""Label value of unknown models and tenants."""

MOST_TENANTS: Final = 100
"""Tenants with time series of their own, at a gateway and in a tier of an engine; the rest counts as ``OTHER``."""

MOST_MODELS: Final = 100
"""Models with time series of their own at a gateway; the rest counts as ``OTHER``."""

LABELS: Final[dict[str, str]] = {
    "basis": "deciding signal: `prefix`, `learned`, `load` and so on; a fixed set of the routing policies",
    "cause": "a status (`status_503`) or a kind of failure; a fixed set",
    "instance": "an instance's id; the time series end with the instance",
    "kind": "a fixed set, listed in the metric's description",
    "kv_tenant": "digest of the tenant's salt, under which engines know the tenant",
    "loop": "a background loop of the gateway; a fixed set",
    "model": (
        f"a model that an instance serves, at most {MOST_MODELS} of them, removed when no instance serves the model; "
        f"`{OTHER}` for any other name"
    ),
    "operation": "an inference route at the gateway; `save`, `load`, `prefetch` or `demote` at an engine",
    "outcome": "outcome; a fixed set",
    "pace": "a pace that ships with kvgate",
    "path": "`hbm_to_ddr`, `ddr_to_hbm`, `ddr_to_nvme`, `nvme_to_ddr`",
    "policy": "a policy that ships with kvgate, with its present parameters",
    "priority": "`high`, `normal` or `low`",
    "process": "`api_server` or `engine`",
    "quantity": "`load` or `compute`",
    "quota": "`requests_per_min`, `tokens_per_min`, `concurrency` or `context_tokens`",
    "reason": "reason; a fixed set",
    "stage": "`receive`, `parse`, `fingerprint`, `admission` or `plan`",
    "state": "a fixed set; exactly one has the value 1",
    "status": "result of a transfer; a fixed set",
    "strategy": "a strategy that ships with kvgate, or `lmdeploy`",
    "tenant": (
        f"at the gateway a tenant with a key or an entry, `anonymous`, or `{OTHER}` (also for a tenant of that "
        f"name); at "
        "an engine the digest that `kvgate_tenant_info` joins with the name, `shared` for requests without a tenant, "
        "or "
        f"`{OTHER}`; at most {MOST_TENANTS} of each"
    ),
    "tier": "`HBM`, `DDR`, `NVME`, `REMOTE`",
    "verdict": "`worth`, `not_worth` or `declined`",
    "version": "version of kvgate",
    "worker": "number of a gateway process on a host, on every metric; absent where there is only one process",
}
