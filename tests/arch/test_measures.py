"""No file, function or class grows beyond its bound: those that are beyond it today are listed, and no other is."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

LONG_FILES = {
    "lab/research/pool/pool.py",
    "lab/research/prefix_index/index.py",
}
LONG_FUNCTIONS = {
    "engines/lmdeploy/attention/decode.py:_attend_kernel",
    "engines/lmdeploy/attention/decode.py:attend",
    "lab/plan/command.py:plan",
    "lab/replay/command.py:replay",
    "lab/simulate/command.py:simulate",
}
LARGE_CLASSES = {
    "engines/lmdeploy/trie/eviction.py:TrieEviction",
    "kvcontrol/kv_policy/tails_first.py:TailsFirst",
    "kvcontrol/kv_runtime/residency.py:Residency",
    "kvcontrol/prefix_reuse/fleet.py:FleetIndex",
    "lab/research/pool/pool.py:KVPool",
    "lab/research/prefix_index/index.py:PrefixReuseIndex",
    "lab/research/prefix_index/naive_index.py:NaivePrefixReuseIndex",
}


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "measures", raising=False)
    import measures as module

    return module


def test_no_further_file_function_or_class_is_beyond_its_bound(measures: ModuleType) -> None:
    found = measures.measure(ROOT, measures.python_files(ROOT))
    assert {each.name for each in found.long_files} - LONG_FILES == set()
    assert {each.name for each in found.long_functions} - LONG_FUNCTIONS == set()
    assert {each.name for each in found.large_classes} - LARGE_CLASSES == set()


def test_the_median_file_stays_short(measures: ModuleType) -> None:
    assert measures.measure(ROOT, measures.python_files(ROOT)).median_file <= 130
