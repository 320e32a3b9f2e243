"""``python -m lab.calibrate.measure URL``: time an engine, and print the [measured] of a profile for it.

Random words as chat messages, on an engine that does nothing else: prompts of several lengths, one at a time, cold and
again; then answers at several batch sizes. Each is timed ``--repeats`` times and the median counts; how many tokens a
prompt has and how many of them were cached is what the engine says (of a cold one, the beginning that the chat template
gives to all). Times are those of whole HTTP requests, so they need a quiet machine.
"""

import argparse
import http.client
import json
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from kvcontrol.traces import used

_TIMEOUT_S = 600.0
_WORDS = (
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "name",
    "team",
    "minute",
    "idea",
    "body",
    "back",
    "parent",
    "face",
    "level",
    "office",
    "door",
)
"""Most tokenizers have each of these as one token."""


class MeasureError(Exception):
    """The engine's answers can't be timed, with the reason."""


class _Timed(NamedTuple):
    """``tokens`` and ``cached`` are those of the first prompt."""

    seconds: float
    tokens: int
    cached: int


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(prog="python -m lab.calibrate.measure", description=__doc__)
    made.add_argument("url", help="where the engine listens")
    made.add_argument("--model", required=True, help="the model's name there")
    made.add_argument(
        "--tokens", type=_counts, default="64,256,512,1024,2048", help="prompt lengths in words; default: 64 to 2048"
    )
    made.add_argument("--batches", type=_counts, default="1,2,4,8", help="batch sizes of decoding; default: 1 to 8")
    made.add_argument("--contexts", type=_counts, default="64,512", help="the same of decoding; default: 64,512")
    made.add_argument("--answer", type=_count, default=33, help="further tokens of a timed answer; default: 33")
    made.add_argument("--repeats", type=_count, default=3, help="times of each; default: 3")
    made.add_argument("--seed", type=int, default=0, help="another seed, other tokens; default: 0")
    return made


def main(arguments: list[str] | None = None, *, clock: Callable[[], float] = time.perf_counter) -> int:
    """Measure and print; 1, with a message, where nothing can be measured."""
    chosen = parser().parse_args(arguments)
    engine = _Engine(chosen.url, chosen.model, random.Random(chosen.seed), clock)  # noqa: S311
    try:
        engine.timed([engine.prompt(chosen.tokens[0])], 1)  # the first of all takes longer
        prefill = [line for tokens in chosen.tokens for line in _prefill(engine, tokens, chosen.repeats)]
        decode = [
            _decode(engine, context, batch, answer=chosen.answer, repeats=chosen.repeats)
            for context in chosen.contexts
            for batch in chosen.batches
        ]
    except MeasureError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("\n".join(["[measured]", "prefill = [", *prefill, "]", "decode = [", *decode, "]"]) + "\n")
    return 0


def _prefill(engine: "_Engine", words: int, repeats: int) -> list[str]:
    cold, again = [], []
    for _ in range(repeats):
        prompt = engine.prompt(words)
        cold.append(engine.timed([prompt], 1))
        again.append(engine.timed([prompt], 1))
    if len(cached := {each.cached for each in cold}) > 1:
        raise MeasureError(
            f"new prompts found {sorted(cached)} tokens cached: does anybody else use the engine, or was it measured "
            "with this --seed before?"
        )
    return [
        f"  {{ tokens = {each.tokens}, cached = {each.cached}, seconds = {each.seconds:.4g} }},"
        for each in (_median(cold), _median(again))
    ]


def _decode(engine: "_Engine", context: int, batch: int, *, answer: int, repeats: int) -> str:
    gaps, tokens = [], 0
    for _ in range(repeats):
        prompts = [engine.prompt(context) for _ in range(batch)]
        engine.timed(prompts, 1)  # from here on their prompts cost next to nothing
        short, long = engine.timed(prompts, 1), engine.timed(prompts, 1 + answer)
        gaps.append((long.seconds - short.seconds) / answer)
        tokens = short.tokens
    gap_s = statistics.median(gaps)
    if gap_s <= 0:
        raise MeasureError(
            f"{answer} more tokens at batch {batch} took no longer: the machine is too noisy, or --answer too small"
        )
    return f"  {{ batch = {batch}, context = {tokens + answer // 2}, seconds = {gap_s:.4g} }},"


def _median(times: list[_Timed]) -> _Timed:
    """Return the one in the middle, by how long it took."""
    return sorted(times)[len(times) // 2]


class _Engine:
    def __init__(self, url: str, model: str, rng: random.Random, clock: Callable[[], float]) -> None:
        self._url = url.rstrip("/") + "/v1/chat/completions"
        self._model = model
        self._rng = rng
        self._clock = clock

    def prompt(self, words: int) -> str:
        """Return so many random words."""
        return " ".join(self._rng.choices(_WORDS, k=words))

    def timed(self, prompts: list[str], answer: int) -> _Timed:
        """Ask for all of them at once, and return how long it took until all had their whole answers."""
        with ThreadPoolExecutor(len(prompts)) as clients:
            began_s = self._clock()
            told = list(clients.map(lambda prompt: self._ask(prompt, answer), prompts))
            return _Timed(self._clock() - began_s, *told[0])

    def _ask(self, prompt: str, answer: int) -> tuple[int, int]:
        """Return how many tokens the prompt has, and how many of them were cached."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": answer,
            "ignore_eos": True,
            "temperature": 0,
        }
        try:
            request = urllib.request.Request(  # noqa: S310 - the address is the operator's
                self._url, json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310
                usage = json.load(response)["usage"]
            told = used(usage)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise MeasureError(f"{self._url} doesn't answer as an engine does: {error!r}") from error
        if told.completion_tokens != answer:
            raise MeasureError(
                f"the engine answered {told.completion_tokens} tokens instead of {answer}: nothing can be timed by that"
            )
        return told.prompt_tokens, told.cached_tokens


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count}; it must be > 0")
    return count


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
