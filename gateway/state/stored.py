"""Stored documents of other versions of kvgate.

Gateways of two versions share a store during an upgrade. So documents are read tolerantly, unlike the bodies of
``/admin/v1``: unknown fields are ignored, and kept when the document is written back. Only values that differ from the
defaults are written, so that an older version meets a new field only where an operator uses it. A document that can't
be read affects no other document, and in documents of independent fields, a field that can't be read no other field.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from gateway.problems import ProblemKind, Problems
from gateway.state.documents import NOT_TEXT, Document, Kind
from gateway.state.json_object import json_object
from gateway.state.store import StoreError

_Body = TypeVar("_Body", bound=BaseModel)
_Value = TypeVar("_Value")
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class UnreadableDocumentError(StoreError):
    """A document that this version can't read; other documents are not affected."""

    def __init__(self, document: Document, reason: str) -> None:
        self.document = document
        self.reason = reason
        super().__init__(f"{document.kind} {document.name!r} can't be read by this version of kvgate: {reason}")


def read(model: type[_Body], document: Document) -> _Body:
    """Return a document's body; raises ``UnreadableDocumentError``."""
    if document.name.startswith(NOT_TEXT):
        raise UnreadableDocumentError(document, "its name is not UTF-8 text")
    try:
        return model.model_validate_json(document.body, extra="ignore")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UnreadableDocumentError(document, f"{where}: {first['msg']}" if where else first["msg"]) from None


def read_in_part(
    model: type[_Body],
    error: UnreadableDocumentError,
    before: _Body | None = None,
    *,
    instead: Mapping[str, Any] = _NOTHING,
) -> _Body | None:
    """Return a document whose fields can't all be read. Each unreadable field has the value that was read ``before``,
    else the one of ``instead``, else its default; None where a field that has none of them is needed.
    """
    if error.document.name.startswith(NOT_TEXT):
        return None  # nothing can be meant by that name
    values = {**instead, **({} if before is None else before.model_dump(mode="json"))}
    try:
        found = dict(fields(error.document))
    except UnreadableDocumentError:
        found = dict(values)
    for _ in range(2):  # once more, without the unreadable fields
        try:
            return model.model_validate_json(json.dumps(found), extra="ignore")
        except ValidationError as invalid:
            for name in {each["loc"][0] for each in invalid.errors() if each["loc"]}:
                found.pop(str(name), None)
                if name in values:
                    found[str(name)] = values[str(name)]
    return None


def fields(document: Document) -> Mapping[str, Any]:
    """Return a document's fields as they are stored, without checking them; raises ``UnreadableDocumentError``."""
    try:
        return json_object(document.body)
    except ValueError as error:
        raise UnreadableDocumentError(document, str(error)) from None


def field(document: Document, name: str) -> Any:
    """Return one field as it is stored; None where it is absent or the document can't be read."""
    try:
        return fields(document).get(name)
    except UnreadableDocumentError:
        return None


def written(body: BaseModel, before: Document | None = None) -> str:
    """Return the text to store for a body, with the fields of the document ``before`` that its model doesn't know."""
    dumped = body.model_dump(mode="json", exclude_defaults=True)
    if before is not None:
        raw, known = _raw_and_known(type(body), before)
        dumped = _with_unknown(dumped, raw, known)
    return json.dumps(dumped)


def patched(document: Document, **changes: Any) -> str:
    """Return a document with some fields changed and all others as they are; raises ``UnreadableDocumentError``."""
    return json.dumps({**fields(document), **changes})


def newer(model: type[BaseModel], document: Document) -> bool:
    """Whether a document has fields, on any level, that its model doesn't know."""
    raw, known = _raw_and_known(model, document)
    return _has_unknown(raw, known)


def readable(view: Callable[[Document], _Value], documents: Sequence[Document]) -> list[_Value]:
    """Return the view of each document that can be read; ``Problems`` names the others."""
    seen = []
    for each in documents:
        try:
            seen.append(view(each))
        except UnreadableDocumentError:
            continue
    return seen


class DocumentReader:
    """Reads all documents of a kind, each on its own. One that can't be read is named in ``problems``."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._before: dict[Kind, Mapping[str, Any]] = {}
        self._unreadable: set[Kind] = set()

    @property
    def whole(self) -> bool:
        """Whether all documents could be read, of each kind the last time."""
        return not self._unreadable

    def read(
        self,
        kind: Kind,
        documents: Sequence[Document],
        parse: Callable[[Document], _Value],
        *,
        otherwise: Callable[[UnreadableDocumentError, _Value | None], _Value | None] = lambda _, before: before,
    ) -> dict[str, _Value]:
        """Return the result of ``parse`` for each, by name. For one that can't be read ``otherwise`` returns the value:
        it receives the reason and the value that was read before, which it returns by default. None leaves it out.
        """
        before: Mapping[str, _Value] = self._before.get(kind, {})
        found: dict[str, _Value] = {}
        unreadable: dict[str, str] = {}
        for each in documents:
            try:
                found[each.name] = parse(each)
            except UnreadableDocumentError as error:
                unreadable[f"{kind}/{each.name}"] = str(error)
                if (instead := otherwise(error, before.get(each.name))) is not None:
                    found[each.name] = instead
        self._before[kind] = found
        (self._unreadable.add if unreadable else self._unreadable.discard)(kind)
        self._problems.replace(ProblemKind.DOCUMENT, f"{kind}/", unreadable)
        return found


def _raw_and_known(model: type[BaseModel], document: Document) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    try:
        raw = fields(document)
    except UnreadableDocumentError:
        return {}, {}
    try:
        return raw, read(model, document).model_dump(mode="json")
    except UnreadableDocumentError:
        return raw, dict.fromkeys(model.model_fields)


def _has_unknown(raw: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    return any(
        name not in known
        or (isinstance(value, dict) and isinstance(known[name], dict) and _has_unknown(value, known[name]))
        for name, value in raw.items()
    )


def _with_unknown(dumped: Mapping[str, Any], raw: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(dumped)
    for name, value in raw.items():
        if name not in known:
            merged[name] = value
        elif all(isinstance(each, dict) for each in (value, known[name], merged.get(name))):
            merged[name] = _with_unknown(merged[name], value, known[name])
    return merged
