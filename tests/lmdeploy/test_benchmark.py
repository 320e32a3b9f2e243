"""The decode benchmark measures a real instance and says what is wrong with one that isn't there."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from lab.bench.engine.decode import main
from tests.support.instance import Instance, free_port

pytestmark = pytest.mark.engine


def test_it_prints_one_object_with_units_in_the_names(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Instance.start(tiny_llama, tmp_path / "log") as instance:
        assert main([instance.url, "--model", "m", "--tokens", "8", "--runs", "2", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["bench"] == "decode"
        assert report["metrics"]["decode_best_tokens_per_s"] >= report["metrics"]["decode_median_tokens_per_s"] > 0
        assert report["metrics"]["first_token_median_s"] > 0
        assert main([instance.url, "--model", "other"]) == 1
        assert "answered 404" in capsys.readouterr().err


def test_an_error_in_the_stream_is_told_and_a_text_that_says_error_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 2}, "error": None}
    with streaming([{"choices": [{"text": '"error"'}]}, {"choices": [{"text": '"error"'}]}, usage]) as url:
        assert main([url, "--model", "m", "--tokens", "2", "--runs", "1"]) == 0
    with streaming([{"choices": [{"text": "a"}]}, {"error": {"message": "instance died"}}]) as url:
        assert main([url, "--model", "m", "--tokens", "2", "--runs", "1"]) == 1
    assert "instance died" in capsys.readouterr().err


@contextmanager
def streaming(events: Sequence[object]) -> Iterator[str]:
    """Answer every request with these events."""

    class Scripted(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            for event in events:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.flush()

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    with HTTPServer(("127.0.0.1", 0), Scripted) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_an_instance_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"http://127.0.0.1:{free_port()}", "--model", "m"]) == 1
    assert "Connection refused" in capsys.readouterr().err
