"""How an earlier release read the store, and what it had written there: frozen, never to be changed with the product.

That release knew no roles of instances, refused unknown fields, and read everything or nothing.
"""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

FILE_NAME = "kvgate.sqlite3"
SCHEMA = (
    "CREATE TABLE kvgate_revision (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), revision BIGINT NOT NULL)",
    "INSERT INTO kvgate_revision (only_row, revision) VALUES (1, 0)",
    (
        "CREATE TABLE kvgate_documents (kind TEXT NOT NULL, name TEXT NOT NULL, body TEXT, version BIGINT NOT NULL, "
        "created_at_s DOUBLE PRECISION NOT NULL, updated_at_s DOUBLE PRECISION NOT NULL, PRIMARY KEY (kind, name))"
    ),
    (
        "CREATE TABLE kvgate_audit (number INTEGER PRIMARY KEY AUTOINCREMENT, at_s DOUBLE PRECISION NOT NULL, "
        "actor TEXT NOT NULL, action TEXT NOT NULL, target TEXT NOT NULL, outcome TEXT NOT NULL, detail TEXT NOT NULL, "
        "request_id TEXT NOT NULL)"
    ),
    "CREATE INDEX kvgate_audit_at ON kvgate_audit (at_s)",
    (
        "CREATE TABLE kvgate_idempotency (key TEXT PRIMARY KEY, request TEXT NOT NULL, status INTEGER NOT NULL, "
        "body TEXT NOT NULL, etag TEXT NOT NULL, at_s DOUBLE PRECISION NOT NULL)"
    ),
)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Tenant(_Body):
    note: str = ""
    suspended: bool = Field(default=False, strict=True)


class _KvBudget(_Body):
    guaranteed_bytes: int = 0
    burst_bytes: int | None = None
    weight: float = 1.0


class _Quota(_Body):
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    concurrency: int | None = None
    context_tokens: int | None = None
    priority: Literal["low", "normal", "high"] = "normal"
    slo: Literal["interactive", "standard", "batch"] = "standard"
    weight: float = 1.0
    kv: dict[Literal["HBM", "DDR", "NVME", "REMOTE"], _KvBudget] = Field(default_factory=dict)


class _Preset(_Body):
    name: str
    hardware: str


class _Policy(_Body):
    name: str
    params: dict[str, str | int | float | bool | None] = Field(default_factory=dict)


class _Key(_Body):
    tenant: str
    digest: str
    note: str = ""
    expires_at_s: float | None = None
    revoked_at_s: float | None = None


class _Instance(_Body):
    url: str | None = None
    draining: bool = Field(default=False, strict=True)


class _Routing(_Body):
    policy: Literal["cost_aware", "prefix_affinity", "consistent_hash", "least_load", "round_robin"]
    prefill_tokens_per_s: float | None = None
    decode_load_s: float | None = None
    spread: float | None = None


class Seen(NamedTuple):
    """What that release understood of a store."""

    keys: set[str]
    """Tenants of the keys that it accepted."""
    suspended: set[str]
    limits: dict[str, _Quota]
    draining: set[str]
    policies: dict[str, str]
    preset: str | None
    routing: str | None


def seen_by_previous_release(state_dir: Path) -> Seen:
    """Read a store as it did: the first document that it did not understand ended it."""
    with closing(sqlite3.connect(state_dir / FILE_NAME)) as store:

        def documents(kind: str) -> dict[str, str]:
            found = store.execute("SELECT name, body FROM kvgate_documents WHERE kind = ? AND body IS NOT NULL", [kind])
            return dict(found.fetchall())

        keys = [_Key.model_validate_json(each) for each in documents("key").values()]
        tenants = {name: _Tenant.model_validate_json(each) for name, each in documents("tenant").items()}
        instances = {name: _Instance.model_validate_json(each) for name, each in documents("instance").items()}
        policies = {name: _Policy.model_validate_json(each) for name, each in documents("policy").items()}
        presets = {name: _Preset.model_validate_json(each) for name, each in documents("preset").items()}
        routing = {name: _Routing.model_validate_json(each) for name, each in documents("routing").items()}
        return Seen(
            keys={each.tenant for each in keys if each.revoked_at_s is None},
            suspended={name for name, each in tenants.items() if each.suspended},
            limits={name: _Quota.model_validate_json(each) for name, each in documents("quota").items()},
            draining={name for name, each in instances.items() if each.draining},
            policies={name: each.name for name, each in policies.items()},
            preset=presets["current"].name if "current" in presets else None,
            routing=routing["fleet"].policy if "fleet" in routing else None,
        )


def written_by_previous_release(digests: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return documents as it wrote them, by kind and name; ``digests`` are those of one key for each tenant."""
    quota = {
        "requests_per_min": None,
        "tokens_per_min": None,
        "concurrency": None,
        "context_tokens": None,
        "priority": "normal",
        "slo": "standard",
        "weight": 1.0,
        "kv": {"DDR": {"guaranteed_bytes": 0, "burst_bytes": 1 << 30, "weight": 1.0}},
    }
    return {
        "tenant": {
            "acme": {"note": "the first", "suspended": False},
            "umbra": {"note": "", "suspended": True},
            "gone": {"note": "", "suspended": False},
        },
        "key": {
            f"{number:012x}": {
                "tenant": tenant,
                "digest": digest,
                "note": "",
                "expires_at_s": None,
                "revoked_at_s": 1_700_000_000.5 if tenant == "gone" else None,
            }
            for number, (tenant, digest) in enumerate(digests.items())
        },
        "quota": {"acme": quota | {"requests_per_min": 600}, "_default": quota},
        "instance": {"a": {"url": None, "draining": True}},
        "routing": {
            "fleet": {"policy": "least_load", "prefill_tokens_per_s": None, "decode_load_s": None, "spread": None}
        },
    }


def store_of_previous_release(state_dir: Path, documents: dict[str, dict[str, Any]]) -> None:
    """Make a store of these documents as that release made it."""
    with closing(sqlite3.connect(state_dir / FILE_NAME, isolation_level=None)) as store:
        store.execute("PRAGMA journal_mode = WAL")
        for statement in SCHEMA:
            store.execute(statement)
        for kind, bodies in documents.items():
            for name, body in bodies.items():
                store.execute(
                    "INSERT INTO kvgate_documents VALUES (?, ?, ?, 1, 1700000000.0, 1700000000.0)",
                    [kind, name, json.dumps(body)],
                )
        store.execute("UPDATE kvgate_revision SET revision = 1")


__all__ = ["Seen", "seen_by_previous_release", "store_of_previous_release", "written_by_previous_release"]
