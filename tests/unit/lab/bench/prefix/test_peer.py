"""A peer races in a process of its own: its times come back, and so do its last words."""

from pathlib import Path

import pytest

from kvgate.failure import CommandError
from lab.bench.prefix import sglang_radix
from lab.bench.prefix.peer import against_sglang
from lab.bench.prefix.race import OurIndex, RacePlan

PLAN = RacePlan(blocks=1_000, lookups=4)

STAND_IN = '''
"""Finds prefixes as SGLang's cache does, through the names of its that the race uses."""
from array import array
from types import SimpleNamespace


class RadixKey:
    def __init__(self, token_ids):
        self.token_ids = token_ids


class RadixCache:
    @classmethod
    def create_simulated(cls, *, page_size):
        cache = cls()
        cache.page_size, cache.held = page_size, []
        return cache

    def insert(self, params):
        self.held.append(params.key.token_ids)

    def match_prefix(self, params):
        asked = params.key.token_ids
        assert isinstance(asked, array) and asked.typecode == "q"
        best = 0
        for held in self.held:
            while best < len(asked) and held[: best + self.page_size] == asked[: best + self.page_size]:
                best += self.page_size
        print("chatter on standard output")
        return SimpleNamespace(device_prefix_len=best)
'''


def sglang_at(folder: Path, radix_cache: str) -> Path:
    package = folder / "sglang" / "srt" / "mem_cache"
    package.mkdir(parents=True)
    package.joinpath("radix_cache.py").write_text(radix_cache)
    package.joinpath("base_prefix_cache.py").write_text(
        "from types import SimpleNamespace\nInsertParams = MatchPrefixParams = SimpleNamespace\n"
    )
    return folder


def test_both_are_timed_on_the_same_prompts(tmp_path: Path) -> None:
    lookups = against_sglang(sglang_at(tmp_path, STAND_IN), PLAN)
    assert [times.structure for times in lookups] == [OurIndex.name, sglang_radix.NAME] * 2
    assert [times.prompt_blocks for times in lookups] == [188, 188, 2_048, 2_048]
    assert all(times.partial is not None and times.hit.p50_us > 0 for times in lookups)


def test_what_stops_a_peer_is_said(tmp_path: Path) -> None:
    folder = sglang_at(tmp_path, "import a_package_that_is_nowhere\n")
    with pytest.raises(CommandError, match="No module named 'a_package_that_is_nowhere'"):
        against_sglang(folder, PLAN)


def test_a_peer_that_finds_too_little_is_not_timed(tmp_path: Path) -> None:
    folder = sglang_at(tmp_path, STAND_IN.replace("self.held.append", "len"))
    with pytest.raises(CommandError, match="found 0 tokens where 12032 are held"):
        against_sglang(folder, PLAN)
