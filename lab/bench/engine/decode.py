"""How fast one stream decodes over HTTP: ``python -m lab.bench.engine.decode URL --model NAME``.

Greedy answers of a fixed length, one after the other, so that a number says what one user sees on an idle instance.
The rate counts from the first token to the last; the median run is reported, the best beside it.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence

import aiohttp

from kvgate.display import show_failure
from lab.bench.timed_chat import ANSWER_LIMIT_S, BenchmarkError, TimedAnswer, chat
from lab.driver.target import Target
from lab.report import Host, Report
from lab.show import show

PROMPT = "The history of the city of Paris begins"


async def measure(target: Target, *, tokens: int, runs: int) -> list[TimedAnswer]:
    """Stream ``runs`` answers of ``tokens`` tokens, after one to warm up; raises ``BenchmarkError``."""
    async with aiohttp.ClientSession() as session:
        answers = [await chat(session, target, [{"role": "user", "content": PROMPT}], tokens) for _ in range(1 + runs)]
    for each in answers:
        if each.completion_tokens < tokens or each.decode_s <= 0:
            raise BenchmarkError(f"{target.url} generated {each.completion_tokens} tokens of {tokens}")
    return answers[1:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="decode", description="Tokens per second of one stream over HTTP.")
    parser.add_argument("url", help="an instance or gateway, for example http://127.0.0.1:9001")
    parser.add_argument("--model", required=True, help="the model's served name")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer (default 64)")
    parser.add_argument("--runs", type=int, default=5, help="answers measured, after one to warm up (default 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(arguments)
    if options.tokens < 2 or options.runs < 1:  # noqa: PLR2004 - a rate needs two tokens
        parser.error("--tokens must be at least 2 and --runs at least 1")
    target = Target(url=options.url.rstrip("/"), model=options.model, timeout_s=ANSWER_LIMIT_S)
    try:
        answers = asyncio.run(measure(target, tokens=options.tokens, runs=options.runs))
    except BenchmarkError as error:
        show_failure(error)
        return 1
    rates = [each.decode_tokens_per_s for each in answers]
    metrics = {
        "decode_median_tokens_per_s": round(statistics.median(rates), 2),
        "decode_best_tokens_per_s": round(max(rates), 2),
        "first_token_median_s": round(statistics.median(each.ttft_s for each in answers), 4),
    }
    show(Report(bench="decode", host=Host.here(), metrics=metrics), as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
