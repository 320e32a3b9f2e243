"""One wide event for each request: one line, valid JSON, with the names that the handbook lists and no others."""

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.telemetry.logs import formatter
from tests.support.fleet import CHAT, chat, running_fleet, script
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import MODEL

PAGE = Path(__file__).parents[3] / "docs" / "operations.md"
FRAME = {"at", "level", "logger", "message"}
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    log, stream = logging.getLogger("gateway.request"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter("json"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield stream
    log.removeHandler(handler)
    log.setLevel(level)


def events(lines: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


def documented() -> set[str]:
    section = PAGE.read_text(encoding="utf-8").split("### The log of requests")[1].split("\n### ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}


async def test_each_request_is_one_line_of_json_however_it_ends(tmp_path: Path, lines: io.StringIO) -> None:
    async with running_fleet(tmp_path) as fleet:
        for body, headers in (
            (chat(stream=True), {"traceparent": TRACEPARENT}),
            (chat(), {"x-request-id": "mine"}),
            (chat(model='no"body\nserves this'), {}),
            (b"{ is no json", {}),
            (chat(), {"x-script": script(die_after=0)}),
            (chat(stream=True), {"x-script": script(die_after=2)}),
        ):
            async with fleet.gateway.post(CHAT, body, **headers) as answer:
                await answer.read()
        await eventually(lambda: lines.getvalue().count("\n") == 6)
    found = events(lines)
    assert [each["outcome"] for each in found] == [
        *("ok", "ok", "client_error", "client_error", "upstream_error", "upstream_error")
    ]
    assert found[1]["request_id"] == "mine"
    assert len({each["request_id"] for each in found}) == 6
    assert "serves this" not in lines.getvalue(), "only a model that exists is named"
    for each in found:
        assert each.keys() - FRAME - documented() == set()
        assert each["operation"] == "chat_completions"
        assert each["status"] >= 200


async def test_a_whole_stream_says_all_that_is_listed(tmp_path: Path, lines: io.StringIO) -> None:
    async with running_fleet(tmp_path) as fleet:
        async with fleet.gateway.post(CHAT, chat(stream=True), traceparent=TRACEPARENT) as answer:
            await answer.read()
        await eventually(lambda: "\n" in lines.getvalue())
    (event,) = events(lines)
    # What went wrong, and how many tokens a prompt has, which only a gateway with a tokenizer knows, is missing.
    assert event.keys() == FRAME | documented() - {"detail", "fingerprint_tokens"}
    assert event["model"] == MODEL
    assert event["trace_id"] == TRACEPARENT.split("-")[1]
    assert event["seconds"] >= event["first_byte_s"] >= event["queued_s"] >= 0
