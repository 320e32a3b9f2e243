"""Both formats of traces are read, and what isn't one is refused by file and line."""

import gzip
import json
from pathlib import Path

import pytest

from lab.traces import AGENTIC, MOONCAKE, TraceError, read_by_time, read_requests, read_trace

TRACES = Path(__file__).parents[5] / "shared" / "traces"


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_mooncakes_lines_are_read_plain_and_gzipped(tmp_path: Path) -> None:
    line = {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 2**40]}
    plain = write(tmp_path / "trace.jsonl", line)
    zipped = tmp_path / "trace.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    for path in (plain, zipped):
        (request,) = read_trace(path)
        assert list(request.block_ids) == [0, 2**40]
        assert (request.block_tokens, request.prompt_tokens, request.at_s) == (512, 700, 3.0)


def test_sessions_of_the_agentic_format_share_no_blocks_and_can_be_laid_side_by_side(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"session": "a", "t": 1.0, "in": 192, "runs": [[0, 2], [7, 1]]},
        {"session": "a", "t": 9.0, "in": 64, "runs": [[0, 1]]},
        {"session": "b", "t": 2.0, "in": 64, "runs": [[0, 1]]},
    )
    first, second, third = read_trace(path)
    assert list(first.block_ids) == [0, 1, 7]
    assert list(second.block_ids) == [0]
    assert third.block_ids[0] not in first.block_ids
    assert [request.at_s for request in read_by_time(path)] == [1.0, 2.0, 9.0]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("[" * 200_000, "nested too deeply"),
        ('{"input_length": 5}', "requests without blocks"),
        ("[]", "requests without blocks"),
        ('{"hash_ids": [1]}', "input_length is missing"),
        ('{"hash_ids": 5, "input_length": 1}', "5 is no list of blocks"),
        ('{"hash_ids": [-1], "input_length": 1}', "-1 is no block"),
        (f'{{"hash_ids": [{2**63}], "input_length": 1}}', "is no block; blocks are numbered from 0, below 2.63"),
        (f'{{"hash_ids": [1], "input_length": 1{"0" * 99}}}', "10{30,}\\.\\.\\.0{30,} tokens; at most"),
        (f'{{"hash_ids": [1], "input_length": 1{"0" * 5000}}}', "a number has more digits than are read"),
        ('{"hash_ids": [1], "input_length": 1, "output_length": 1e3}', "1000.0 is no number of tokens"),
        ('{"hash_ids": [1], "input_length": "many"}', "'many' is no number of tokens"),
        ('{"hash_ids": [1], "input_length": true}', "True is no number of tokens"),
        ('{"hash_ids": ["x"], "input_length": 1}', "'x' is no block"),
        ('{"hash_ids": [true], "input_length": 1}', "True is no block"),
        ('{"hash_ids": [1], "input_length": 1, "timestamp": NaN}', "nan is no time"),
        ('{"hash_ids": [1], "input_length": 1, "timestamp": 1e999}', "inf is no time"),
        ('{"hash_ids": [1], "input_length": 1, "timestamp": -7}', "-7 is no time"),
        ('{"hash_ids": [1], "input_length": 1, "timestamp": true}', "True is no time"),
        ('{"hash_ids": [1], "input_length": 1, "timestamp": 1e300}', "1e.300 is no time: more than 100 years"),
        (f'{{"hash_ids": [1], "input_length": 1, "timestamp": 1{"0" * 999}}}', "is no time: more than 100 years"),
        ('{"session": "a", "t": NaN, "in": 1, "runs": []}', "nan is no time"),
        ('{"session": "a", "t": 4e9, "in": 1, "runs": []}', "no time: more than 100 years; .* 3,155,760,000 .seconds"),
        ('{"session": ["a"], "t": 0, "in": 1, "runs": []}', "'a'. is no session; that is a name or a number"),
        ('{"session": "a", "t": 0, "in": 1, "runs": {}}', "{} is no list of runs"),
        ('{"session": "a", "t": 0, "in": 1, "runs": [[1, 2, 3]]}', "1, 2, 3. is no run; that is .start, length."),
        ('{"session": "a", "t": 0, "in": 1, "runs": [7]}', "7 is no run; that is .start, length."),
        ('{"session": "a", "t": 0, "in": 1, "runs": [[0, 9000000]]}', "outside of a session"),
    ],
)
def test_a_line_that_is_no_request_is_refused_with_its_number(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(TraceError, match=rf"trace.jsonl, line 1: .*{why}"):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"hash_ids": [1], "input_length": 100_000}, r"1 blocks for .* 100,000 tokens; .* has 195 \(or 196 with"),
        ({"hash_ids": [1, 2, 3], "input_length": 5}, r"3 blocks for .* 5 tokens; .* has 0 \(or 1 with the partial one"),
        ({"hash_ids": [1], "input_length": 0}, "1 blocks for .* 0 tokens; at 512 tokens a block it has 0"),
        ({"hash_ids": [1, 1], "input_length": 1024}, "a block is twice in one prompt"),
        ({"session": "a", "t": 0, "in": 64, "runs": [[5, 1], [5, 1]]}, "2 blocks for .* 64 tokens; .* it has 1"),
        ({"session": "a", "t": 0, "in": 128, "runs": [[5, 1], [5, 1]]}, "a block is twice in one prompt"),
        ({"session": "a", "t": 0, "in": 320, "runs": [[5, 1]]}, "1 blocks for .* 320 tokens; .* it has 5"),
        ([1], r"\[1\] is no request; that is an object"),
    ],
)
def test_blocks_are_those_of_a_prompt_of_its_length(tmp_path: Path, line: dict[str, object], why: str) -> None:
    first = {"session": "a", "t": 0, "in": 0, "runs": []} if "runs" in line else {"hash_ids": [], "input_length": 0}
    path = write(tmp_path / "trace.jsonl", first, line)
    with pytest.raises(TraceError, match=rf"trace.jsonl, line 2: {why}"):
        list(read_trace(path))


def test_the_partial_block_is_there_or_not_and_times_may_count_from_1970(tmp_path: Path) -> None:
    lines = [{"hash_ids": ids, "input_length": 700, "timestamp": 1.7e12} for ids in ([3], [3, 4])]
    assert [len(each.block_ids) for each in read_trace(write(tmp_path / "trace.jsonl", *lines))] == [1, 2]


@pytest.mark.parametrize("wrong", [b"\xff\xfe", b"{"])
@pytest.mark.parametrize("is_zipped", [False, True])
def test_the_line_that_is_named_is_the_files_own(tmp_path: Path, wrong: bytes, is_zipped: bool) -> None:  # noqa: FBT001
    lines = b'\n\n{"hash_ids": [1], "input_length": 1}\n\n' + wrong + b"\n"
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.compress(lines) if is_zipped else lines)
    for read in (read_trace, read_requests):
        with pytest.raises(TraceError, match=r"trace\.jsonl, line 5: "):
            list(read(path))


def test_a_broken_archive_is_refused_by_every_reader(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"hash_ids": [1], "input_length": 1}\n' * 10_000)
    broken = tmp_path / "broken.gz"
    broken.write_bytes(whole[:10] + b"\xff" * 40 + whole[50:])
    for read in (read_trace, read_requests):
        with pytest.raises(TraceError, match=r"broken\.gz, line 1: "):
            list(read(broken))


def test_an_empty_file_and_half_an_archive_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(TraceError, match="is empty"):
        list(read_trace(empty))
    half = tmp_path / "half.gz"
    half.write_bytes(gzip.compress(b'{"hash_ids": [1], "input_length": 1}\n' * 100)[:40])
    with pytest.raises(TraceError, match=r"half\.gz"):
        list(read_trace(half))


@pytest.mark.skipif(not TRACES.is_dir(), reason="the traces are not beside this checkout")
@pytest.mark.parametrize(("file", "requests", "distinct"), [(MOONCAKE, 12_031, 182_790), (AGENTIC, 1_567, 88_764)])
def test_the_public_traces_have_as_many_blocks_as_is_known_of_them(file: str, requests: int, distinct: int) -> None:
    read = list(read_trace(TRACES / file))
    assert len(read) == requests
    assert len({block for request in read for block in request.block_ids}) == distinct


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    line = json.dumps({"timestamp": 0, "input_length": 256_000, "hash_ids": list(range(500))}) + "\n"
    whole = gzip.compress("".join(line.replace("256000", str(255_500 + each)) for each in range(500)).encode())
    path = tmp_path / "trace.gz"
    path.write_bytes(whole[: len(whole) // 2] + bytes(range(255, 0, -1)) * 20)
    with pytest.raises(TraceError, match="line"):
        list(read_trace(path))
