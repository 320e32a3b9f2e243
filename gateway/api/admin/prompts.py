"""A prompt in an operator's request: its forms, and its fingerprint."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from gateway.errors import InvalidRequestError
from gateway.fingerprint import Fingerprint, Fingerprinter, Gap
from gateway.fingerprint.canonical import Prompt, TextPrompt, TokenPrompt, canonical_chat
from gateway.registry import Registry
from gateway.registry.missing_model import missing_model
from gateway.state.bodies import Name
from gateway.types import Tenant, TenantId


class PromptBody(BaseModel):
    """A prompt in one of its forms."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, max_length=512)
    tenant: Name = Field("anonymous", description="Whose prompt it is: tenants don't share cached blocks.")
    prompt: str | list[Annotated[int, Field(ge=0, lt=1 << 32)]] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


def check_model(body: PromptBody, registry: Registry) -> None:
    """Raise ``NotFoundError`` or ``NoInstanceError`` for a model that no instance lists."""
    if not registry.models.knows(body.model):
        raise missing_model(registry, body.model)


def check_one(body: PromptBody, other: str) -> None:
    """Raise ``InvalidRequestError`` unless exactly one of the forms is given; ``other`` is the field for hashes."""
    given = [name for name in ("prompt", "messages", other) if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(f"give one of prompt, messages and {other}", param="prompt")


async def fingerprint_of(body: PromptBody, fingerprinter: Fingerprinter, salt: str) -> Fingerprint | Gap:
    """Return the fingerprint of a prompt or a conversation, or why it has none."""
    prompt: Prompt
    if body.messages is not None:
        prompt = canonical_chat(body.messages, tools=body.tools)
        size = sum(len(str(each)) for each in body.messages)
    elif isinstance(body.prompt, str):
        prompt, size = TextPrompt(text=body.prompt), len(body.prompt)
    else:
        prompt, size = TokenPrompt(token_ids=tuple(body.prompt or ())), 0
    tenant = Tenant(id=TenantId(body.tenant), salt=salt)
    return await fingerprinter.fingerprint(prompt, size_bytes=size, model=body.model, tenant=tenant)
