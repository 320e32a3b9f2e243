"""Traces without blocks are read beside those with them."""

import gzip
import json
from pathlib import Path

import pytest

from lab.traces import TraceError, read_requests

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_azures_requests_have_times_and_lengths_and_no_blocks(tmp_path: Path) -> None:
    plain = tmp_path / "azure.csv"
    plain.write_text(f"{HEAD}2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:46.6805900,374,44\n")
    zipped = tmp_path / "azure.csv.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    for path in (plain, zipped):
        first, second = read_requests(path)
        assert (first.prompt_tokens, first.output_tokens, list(first.block_ids)) == (374, 44, [])
        assert (second.prompt_tokens, second.output_tokens) == (396, 109)
        assert second.at_s - first.at_s == pytest.approx(4.314579, abs=1e-5)


def test_traces_with_blocks_come_by_their_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"hash_ids": [1], "input_length": 5, "timestamp": at} for at in (7000, 3000)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [each.at_s for each in read_requests(path)] == [3.0, 7.0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"{HEAD}2023-11-16 18:15:46,many,44\n", "line 2: 'many' is no number of tokens"),
        (f"{HEAD}2023-11-16 18:15:46,374\n", "line 2: GeneratedTokens is missing"),
        (f"{HEAD}2023-11-16 18:15:46,{'9' * 5000},44\n", "line 2: '9+\\.\\.\\.9+' is no number of tokens"),
        (f"{HEAD}9999-11-16 18:15:46,374,44\n", "line 2: .* is no time: more than 100 years"),
        (f"{HEAD}yesterday,374,44\n", "line 2: 'yesterday' is no time; that is like 2023-11-16"),
        ("TIMESTAMP,Tokens\n2023-11-16 18:15:46,374\n", "line 2: ContextTokens is missing"),
        ("hello\n", "line 1: not JSON"),
        ("", "is empty"),
    ],
)
def test_what_is_no_trace_is_refused_by_its_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=why):
        read_requests(path)


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(f"{HEAD}2023-11-16 18:15:46,374,44\n".encode() * 1000)[:-20])
    with pytest.raises(TraceError):
        read_requests(path)
