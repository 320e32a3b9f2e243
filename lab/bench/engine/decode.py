"""How fast one stream decodes over HTTP: ``python -m lab.bench.engine.decode URL --model NAME``.

Greedy completions of a fixed length, one after the other, so that a number says what one user sees on an idle instance.
The rate counts from the first token to the last; the median run is reported, the best beside it.
"""

import argparse
import http.client
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

PROMPT = "The history of the city of Paris begins"
READ_TIMEOUT_S = 120.0


class BenchmarkError(RuntimeError):
    """The instance gave no measurement; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One completion: seconds to its first token, and tokens per second after it."""

    first_token_s: float
    tokens_per_s: float


def measure(url: str, model: str, tokens: int) -> Run:
    """Stream one completion of ``tokens`` tokens; raises ``BenchmarkError``."""
    address = urlsplit(url)
    if address.scheme != "http" or address.hostname is None:
        raise BenchmarkError(f"{url!r} is no http:// URL")
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(address.hostname, address.port or 80, timeout=READ_TIMEOUT_S)
    try:
        started = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise BenchmarkError(f"{url} answered {response.status}: {response.read(500).decode(errors='replace')}")
        first, last, generated = _read_stream(response, url)
    except OSError as error:
        raise BenchmarkError(f"{url}: {error}") from error
    finally:
        connection.close()
    if generated < tokens or last <= first:
        raise BenchmarkError(f"{url} generated {generated} tokens of {tokens}")
    return Run(first_token_s=first - started, tokens_per_s=(generated - 1) / (last - first))


def _read_stream(response: http.client.HTTPResponse, url: str) -> tuple[float, float, int]:
    """Return the times of the first and the last token, and the number of tokens that the usage names."""
    first = last = 0.0
    generated = 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if event.get("error") is not None:
            raise BenchmarkError(f"{url} failed mid-stream: {event['error']}")
        if event.get("choices"):
            last = time.perf_counter()
            first = first or last
        if event.get("usage"):
            generated = event["usage"]["completion_tokens"]
    return first, last, generated


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="decode", description="Tokens per second of one stream over HTTP.")
    parser.add_argument("url", help="an instance or gateway, for example http://127.0.0.1:9001")
    parser.add_argument("--model", required=True, help="the model's served name")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per completion (default 64)")
    parser.add_argument("--runs", type=int, default=5, help="completions measured, after one to warm up (default 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(arguments)
    if options.tokens < 2 or options.runs < 1:  # noqa: PLR2004 - a rate needs two tokens
        parser.error("--tokens must be at least 2 and --runs at least 1")
    try:
        measure(options.url, options.model, options.tokens)
        runs = [measure(options.url, options.model, options.tokens) for _ in range(options.runs)]
    except BenchmarkError as error:
        print(f"decode: {error}", file=sys.stderr)  # noqa: T201
        return 1
    rates = [run.tokens_per_s for run in runs]
    metrics = {
        "decode_median_tokens_per_s": round(statistics.median(rates), 2),
        "decode_best_tokens_per_s": round(max(rates), 2),
        "first_token_median_s": round(statistics.median(run.first_token_s for run in runs), 4),
    }
    if options.json:
        host = {"machine": platform.machine(), "cores": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 2)}
        print(json.dumps({"bench": "decode", "host": host, "metrics": metrics}))  # noqa: T201
    else:
        for name, value in metrics.items():
            print(f"{name:28} {value}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
