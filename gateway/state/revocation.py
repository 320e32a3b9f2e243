"""Revoking stored API keys, also keys that this version can't read: the other fields are kept for other versions."""

import json

from gateway.state.documents import Document
from gateway.state.stored import UnreadableDocumentError, field, patched


def is_revoked(document: Document) -> bool:
    """Whether a stored key is revoked, whatever else it contains."""
    return type(field(document, "revoked_at_s")) in {int, float}


def revoked(document: Document, at_s: float) -> str:
    """Return the body of a key that is revoked from ``at_s`` on, or since before."""
    if is_revoked(document):
        return document.body
    try:
        return patched(document, revoked_at_s=at_s)
    except UnreadableDocumentError:  # it is no JSON object: there are no fields to keep
        return json.dumps({"revoked_at_s": at_s})
