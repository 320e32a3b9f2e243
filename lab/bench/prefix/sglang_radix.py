"""SGLang's radix cache, for a race with our prefix index, in a process of its own.

SGLang is no dependency of kvgate and changes libraries that it shares a process with. So this module is also a program:
given a plan as JSON it races the cache against our index and writes the times, as JSON, to a file.

    PYTHONPATH=FOLDER python -m lab.bench.prefix.sglang_radix '{"blocks": 100000}' RESULT

``FOLDER`` has the unpacked wheel, and whatever ``sglang.srt.mem_cache.radix_cache`` imports that isn't installed.
"""

import json
import sys
from array import array
from dataclasses import asdict
from pathlib import Path

from lab.bench.prefix.lookup_times import BLOCK_TOKENS
from lab.bench.prefix.race import OurIndex, RacePlan, race

NAME = "SGLang RadixCache"


class SglangRadix:
    """A cache without memory pools, made by SGLang's own constructor for that, whose pages are our blocks.

    A node holds a run of tokens of any number of pages; a match compares runs, and splits the run that it ends in.
    Raises ``ImportError`` where SGLang can't be imported.
    """

    name = NAME

    def __init__(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        self._key = RadixKey
        self._insertion = InsertParams
        self._match = MatchPrefixParams
        self._cache = RadixCache.create_simulated(page_size=BLOCK_TOKENS)

    def given(self, tokens: "array[int]") -> "array[int]":
        return array("q", tokens)

    def insert(self, prompt: "array[int]") -> None:
        self._cache.insert(self._insertion(key=self._key(prompt)))

    def find(self, prompt: "array[int]") -> int:
        return int(self._cache.match_prefix(self._match(key=self._key(prompt))).device_prefix_len)


def main(plan: str, result: str) -> None:
    """Race, and write the list of times."""
    race_plan = RacePlan(**json.loads(plan))
    times = race([OurIndex(race_plan), SglangRadix()], race_plan)
    Path(result).write_text(json.dumps([asdict(each) for each in times]), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
