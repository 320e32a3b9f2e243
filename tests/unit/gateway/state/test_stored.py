"""Documents of other versions: what is ignored, what is kept, what fails alone."""

import json

import pytest

from gateway.problems import ProblemKind, Problems
from gateway.state import Document, Kind
from gateway.state.bodies import KeyBody, KvBudgetBody, QuotaBody, TenantBody
from gateway.state.fleet_bodies import InstanceBody
from gateway.state.stored import (
    DocumentReader,
    UnreadableDocumentError,
    field,
    newer,
    patched,
    read,
    read_in_part,
    readable,
    written,
)
from kvcontrol.core.roles import EngineRole


def document(body: str, name: str = "acme", kind: Kind = Kind.QUOTA) -> Document:
    return Document(kind=kind, name=name, body=body, version=1, created_at_s=1.0, updated_at_s=1.0)


def test_unknown_fields_are_ignored_on_every_level() -> None:
    body = read(QuotaBody, document('{"concurrency": 3, "new": [1], "kv": {"DDR": {"burst_bytes": 5, "new": 1}}}'))
    assert body == QuotaBody(concurrency=3, kv={"DDR": KvBudgetBody(burst_bytes=5)})


def test_only_what_differs_from_the_defaults_is_written() -> None:
    assert json.loads(written(InstanceBody(draining=True))) == {"draining": True}
    assert json.loads(written(TenantBody())) == {}


def test_unknown_fields_are_kept_on_every_level_when_a_document_is_written_back() -> None:
    before = document('{"concurrency": 3, "new": {"a": 1}, "kv": {"DDR": {"new": 1}, "HBM": {"new": 2}}}')
    after = QuotaBody(requests_per_min=7, kv={"DDR": KvBudgetBody(burst_bytes=5)})
    assert json.loads(written(after, before)) == {
        "requests_per_min": 7,
        "new": {"a": 1},
        "kv": {"DDR": {"burst_bytes": 5, "new": 1}},
    }
    assert newer(QuotaBody, before)
    assert not newer(QuotaBody, document(written(after)))


def test_unknown_fields_of_a_document_that_can_not_be_read_are_kept_too() -> None:
    before = document('{"suspended": "partly", "new": 1, "note": "n"}', kind=Kind.TENANT)
    assert json.loads(written(TenantBody(note="m"), before)) == {"note": "m", "new": 1}


def test_a_document_is_patched_without_being_understood() -> None:
    assert json.loads(patched(document('{"a": 1, "b": {"c": 2}}'), a=5)) == {"a": 5, "b": {"c": 2}}


@pytest.mark.parametrize("body", ["", "[1]", "nonsense", '{"concurrency": "many"}', '{"kv": {"DDR": 3}}'])
def test_one_that_can_not_be_read_is_named(body: str) -> None:
    with pytest.raises(UnreadableDocumentError, match="quota 'acme' can't be read by this version"):
        read(QuotaBody, document(body))
    assert readable(lambda each: read(QuotaBody, each), [document(body), document("{}", "b")]) == [QuotaBody()]
    assert field(document(body), "priority") is None


def unreadable(body: str) -> UnreadableDocumentError:
    return UnreadableDocumentError(document(body), "of a newer version")


def test_an_unreadable_field_has_the_value_of_before_or_a_given_one_or_its_default_and_the_others_hold() -> None:
    error = unreadable('{"draining": true, "role": "of tomorrow", "zone": 1}')
    assert read_in_part(InstanceBody, error) == InstanceBody(draining=True)
    before = InstanceBody(url="http://127.0.0.1:1", role=EngineRole.DECODE)
    assert read_in_part(InstanceBody, error, before) == InstanceBody(draining=True, role=EngineRole.DECODE)
    partly = unreadable('{"suspended": "partly", "note": "n"}')
    assert read_in_part(TenantBody, partly, instead={"suspended": True}) == TenantBody(suspended=True, note="n")
    quota = unreadable('{"requests_per_min": 6, "priority": "urgent", "kv": {"CXL": {}}}')
    assert read_in_part(QuotaBody, quota) == QuotaBody(requests_per_min=6)


@pytest.mark.parametrize("body", ["", "[1]", "nonsense"])
def test_a_document_that_is_no_object_is_as_before_or_as_given(body: str) -> None:
    before = QuotaBody(concurrency=3)
    assert read_in_part(QuotaBody, unreadable(body), before) == before
    assert read_in_part(TenantBody, unreadable(body), instead={"suspended": True}) == TenantBody(suspended=True)


@pytest.mark.parametrize("body", ["", '{"tenant": "acme"}', '{"tenant": "acme", "digest": "no digits"}'])
def test_a_document_without_a_field_that_is_needed_can_not_be_read_in_part(body: str) -> None:
    assert read_in_part(KeyBody, unreadable(body)) is None


def test_one_that_can_not_be_read_fails_alone_keeps_what_was_read_before_and_is_a_problem_until_it_is_readable() -> (
    None
):
    problems = Problems()
    reader = DocumentReader(problems)

    def limits(*bodies: str) -> dict[str, int | None]:
        documents = [document(body, f"t{number}") for number, body in enumerate(bodies)]
        found = reader.read(Kind.QUOTA, documents, lambda each: read(QuotaBody, each))
        return {name: each.concurrency for name, each in found.items()}

    assert limits('{"concurrency": 1}', '{"concurrency": 2}') == {"t0": 1, "t1": 2}
    assert limits("broken", '{"concurrency": 3}', "broken") == {"t0": 1, "t1": 3}
    assert [each.subject for each in problems.all()] == ["quota/t0", "quota/t2"]
    assert problems.counts()[ProblemKind.DOCUMENT] == 2
    assert limits('{"concurrency": 4}') == {"t0": 4}
    assert problems.all() == ()
