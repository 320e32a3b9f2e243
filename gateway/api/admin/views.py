"""The views of ``/admin/v1``."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.state import Document
from gateway.state.bodies import KeyBody, Name, QuotaBody, TenantBody, Text
from gateway.state.stored import UnreadableDocumentError, field, read


class _View(BaseModel):
    model_config = ConfigDict(frozen=True)


class ErrorDetail(_View):
    """OpenAI's error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorView(_View):
    """Every failure."""

    error: ErrorDetail


class TenantView(TenantBody):
    """A tenant as it is."""

    id: str
    version: int
    created_at_s: float = Field(description="Seconds since 1970.")
    updated_at_s: float = Field(description="Seconds since 1970.")


class QuotaView(QuotaBody):
    """A tenant's quota as it is."""

    tenant: str
    version: int
    updated_at_s: float = Field(description="Seconds since 1970.")


class KeyView(_View):
    """A key, but not itself."""

    id: str
    tenant: str
    note: str
    created_at_s: float = Field(description="Seconds since 1970.")
    expires_at_s: float | None
    revoked_at_s: float | None
    version: int


class NewKeyView(KeyView):
    """A key that was just made: ``key`` is shown this once. It is null where the request was repeated."""

    key: str | None = None


class NewKeyBody(BaseModel):
    """Which key to make."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant: Name
    note: Text = Field("", description="For people.")
    expires_in_s: float | None = Field(None, gt=0, le=10 * 365 * 86_400, description="Seconds until it is refused.")


class TenantList(_View):
    """All tenants."""

    object: Literal["list"] = "list"
    data: list[TenantView]
    configured: list[str] = Field(description="Tenants of the keys in the settings.")


class QuotaList(_View):
    """All quotas; the one of tenants that have none of their own is called ``_default``."""

    object: Literal["list"] = "list"
    data: list[QuotaView]


class KeyList(_View):
    """Keys, revoked ones included."""

    object: Literal["list"] = "list"
    data: list[KeyView]
    configured: list[str] = Field(description="The tenant of each key in the settings.")


class AuditView(_View):
    """One entry of the audit log."""

    number: int
    at_s: float = Field(description="Seconds since 1970.")
    actor: str
    action: str
    target: str
    outcome: str
    detail: dict[str, Any]
    request_id: str


class AuditList(_View):
    """Entries, newest first; ``next_before`` leads to older ones, null when there are none."""

    object: Literal["list"] = "list"
    data: list[AuditView]
    next_before: int | None


class UsageView(_View):
    """A tenant's usage of the last minute, and its running and waiting requests."""

    tenant: str
    requests: int
    tokens: int
    running: int


def tenant_view(document: Document) -> TenantView:
    """Return a stored tenant as it is shown."""
    body = read(TenantBody, document)
    return TenantView(
        **dict(body),
        id=document.name,
        version=document.version,
        created_at_s=document.created_at_s,
        updated_at_s=document.updated_at_s,
    )


def quota_view(document: Document) -> QuotaView:
    """Return a stored quota as it is shown."""
    body = read(QuotaBody, document)
    return QuotaView(**dict(body), tenant=document.name, version=document.version, updated_at_s=document.updated_at_s)


def key_view(document: Document) -> KeyView:
    """Return a stored key as it is shown."""
    body = read(KeyBody, document)
    return KeyView(
        id=document.name,
        tenant=body.tenant,
        note=body.note,
        created_at_s=document.created_at_s,
        expires_at_s=body.expires_at_s,
        revoked_at_s=body.revoked_at_s,
        version=document.version,
    )


def revoked_view(document: Document) -> KeyView:
    """Return a revoked key as it is shown, also one that this version can't read."""
    try:
        return key_view(document)
    except UnreadableDocumentError:
        return KeyView(
            id=document.name,
            tenant=str(field(document, "tenant")),
            note="",
            created_at_s=document.created_at_s,
            expires_at_s=None,
            revoked_at_s=document.updated_at_s,
            version=document.version,
        )
