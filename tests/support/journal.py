"""What several threads did to one prefix index, in the order in which it took effect, and whether that was right.

Every call that changes the index happens under its one lock, so the order of lock sections *is* the order of the
changes: replayed in it, one after the other, the naive twin must give equal answers to every one of them. What readers
used (their notes) takes effect in the section of the writer that follows it, and is replayed there.

A look-up without a lock sees the index while it changes. It must have found what was held at some moment between its
begin and its end, and must have ended where, at some such moment, nothing more was held. States are numbered by the
sections that made them; those between a look-up's begin and end are its window.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Protocol

from kvcontrol.core import BlockHash
from lab.research.prefix_index.entry import EntryId, LeaseId, PrefixEntry
from lab.research.prefix_index.index import PrefixReuseIndex
from lab.research.prefix_index.naive_index import NaivePrefixReuseIndex
from lab.research.prefix_index.node import Node
from lab.research.prefix_index.protocol import PrefixIndex
from tests.support.prefixes import SIZE

Step = tuple[str, bytes, str]
"""What to do, with which prompt, for which tenant."""

READS: Final = ("lookup", "verify", "lookup_all")
WRITES: Final = ("insert", "acquire", "release", "pin", "unpin", "invalidate", "evict", "dump")


class Lock(Protocol):
    """What the index locks with."""

    def acquire(self) -> Any: ...
    def release(self) -> Any: ...


@dataclass(eq=False)
class Call:
    """One call as it was made: its arguments, its answer, the first and last state that it may have seen."""

    name: str
    tokens: bytes
    salt: str
    argument: Any = None
    answer: Any = None
    window: tuple[int, int] = (0, 0)
    runs: list[tuple[int, ...]] = field(default_factory=list)
    entries: list[tuple[PrefixEntry, ...]] = field(default_factory=list)


@dataclass(eq=False)
class Section:
    """One stretch under the lock: whose it was, and the tails whose use it followed."""

    call: Call | None
    used: list[tuple[BlockHash, int]] = field(default_factory=list)


class _Notes(deque[Node]):
    def __init__(self, journal: "Journal") -> None:
        super().__init__()
        self._journal = journal

    def popleft(self) -> Node:
        tail = super().popleft()
        self._journal.sections[-1].used.append((tail.key, tail.block_id))
        return tail


class Journal:
    """Watches one index; also its lock. Calls go through ``play``."""

    def __init__(self, index: PrefixReuseIndex, lock: Lock) -> None:
        self._index = index
        self._lock = lock
        self._current = threading.local()
        self._block_ids = count(1_000_000)
        self.sections: list[Section] = []
        self.completed = 0
        self.calls: list[Call] = []
        index.evict_lru(0)  # what was used before is no part of this
        index._lock = self  # type: ignore[assignment]
        index._ages.notes = _Notes(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        self.sections.append(Section(getattr(self._current, "call", None)))

    def __exit__(self, *failure: object) -> None:
        self.completed += 1
        self._lock.release()

    def player(self, steps: Sequence[Step]) -> Callable[[], None]:
        """Return a thread's work: the steps in order, then giving back all that they acquired."""

        def play() -> None:
            entries: list[EntryId] = []
            leases: list[LeaseId] = []
            for name, tokens, salt in [*steps, *[("release", b"", "")] * len(steps)]:
                call = Call(name, tokens, salt)
                if name == "insert":
                    call.argument = [next(self._block_ids) for _ in range(len(tokens) // (SIZE * 4))]
                elif name in {"pin", "unpin"} and entries:
                    call.argument = entries[-1]
                elif name == "release" and leases:
                    call.argument = leases.pop(0)
                elif name in {"pin", "unpin", "release"}:
                    continue
                elif name == "verify":  # a look-up, and a call with a window of its own
                    found = Call("lookup", tokens, salt)
                    self._make(found)
                    call.argument = found.answer
                self._make(call)
                if name == "insert" and call.answer.entry is not None:
                    entries.append(call.answer.entry.entry_id)
                elif name == "acquire":
                    leases.append(call.answer.lease_id)

        return play

    def _make(self, call: Call) -> None:
        self._current.call = call
        first = self.completed
        call.answer = perform(self._index, call)
        call.window = (first, len(self.sections))
        self.calls.append(call)
        self._current.call = None

    def judge(self, twin: NaivePrefixReuseIndex) -> None:
        """Replay all into a twin that was equal before, and compare; both are equal again afterwards."""
        with_notes = Call("evict", b"", "", argument=0)
        self._make(with_notes)
        readers = [call for call in self.calls if call.name in READS]
        for number, section in enumerate([None, *self.sections]):
            if section is not None:
                _replay(twin, section)
            for call in readers:
                if call.window[0] <= number <= call.window[1]:
                    keys = twin.keys.of(call.tokens, salt=call.salt)
                    call.runs.append(_run(twin, keys))
                    call.entries.append(twin.lookup_all(call.tokens, salt=call.salt))
        for call in readers:
            _judge_reader(call, twin)
        assert self._index.dump() == twin.dump()
        ours, theirs = self._index.report(), twin.report()
        for name in ("collisions", "inserted_blocks", "evicted_blocks", "invalidated_blocks", "entries", "held_blocks"):
            assert getattr(ours, name) == getattr(theirs, name), name


def perform(index: PrefixIndex, call: Call) -> Any:
    """Make a call on an index and return its answer, a refusal as its text."""
    try:
        return _PERFORM[call.name](index, call)
    except (KeyError, ValueError) as error:
        return repr(error)


def _invalidate(index: PrefixIndex, call: Call) -> Any:
    return [sorted(index.invalidate(key)) for key in index.keys.of(call.tokens, salt=call.salt)[-1:]]


def _evict(index: PrefixIndex, call: Call) -> Any:
    return index.evict_lru(len(call.tokens) // (SIZE * 4) if call.argument is None else call.argument)


_PERFORM: dict[str, Callable[[PrefixIndex, Call], Any]] = {
    "lookup": lambda index, call: index.lookup(call.tokens, salt=call.salt),
    "verify": lambda index, call: index.matcher.verify(call.argument, call.tokens),
    "lookup_all": lambda index, call: index.lookup_all(call.tokens, salt=call.salt),
    "insert": lambda index, call: index.insert(
        call.tokens, call.argument, salt=call.salt, metadata={"salt": call.salt}
    ),
    "acquire": lambda index, call: index.acquire(call.tokens, salt=call.salt),
    "release": lambda index, call: index.release(call.argument),
    "pin": lambda index, call: index.pin(call.argument),
    "unpin": lambda index, call: index.unpin(call.argument),
    "invalidate": _invalidate,
    "evict": _evict,
    "dump": lambda index, _: index.dump(),
}


def _replay(twin: NaivePrefixReuseIndex, section: Section) -> None:
    for key, block_id in section.used:
        lineage = twin.lineage_of(key)
        if lineage is None or lineage.block_id != block_id:
            continue  # gone by now: there is nothing to make young
        chain = [key]
        while lineage is not None and lineage.parent is not None:
            chain.insert(0, lineage.parent)
            lineage = twin.lineage_of(lineage.parent)
        twin.lookup_keys(chain, len(chain) * SIZE)
    if section.call is not None:
        said = perform(twin, section.call)
        assert said == section.call.answer, f"{section.call.name}: {section.call.answer} and not {said}"


def _run(twin: NaivePrefixReuseIndex, keys: Sequence[BlockHash]) -> tuple[int, ...]:
    """Return the ids of the longest held prefix without making it younger."""
    run: list[int] = []
    parent: BlockHash | None = None
    for key in keys:
        lineage = twin.lineage_of(key)
        if lineage is None or lineage.parent != parent:
            break
        run.append(lineage.block_id)
        parent = key
    return tuple(run)


def _judge_reader(call: Call, twin: NaivePrefixReuseIndex) -> None:
    if call.name == "lookup_all":
        ever = {entry.entry_id for entries in call.entries for entry in entries}
        always = set.intersection(*({entry.entry_id for entry in entries} for entries in call.entries))
        found = {entry.entry_id for entry in call.answer}
        assert always <= found <= ever
        return
    hit = call.answer
    ids = hit.kv_block_ids
    keys = twin.keys.of(call.tokens, salt=call.salt)
    assert hit.block_hashes == tuple(keys[: len(ids)])
    assert (hit.matched_length, hit.remaining_tokens) == (len(ids) * SIZE, len(call.tokens) // 4 - len(ids) * SIZE)
    assert any(run[: len(ids)] == ids for run in call.runs), f"{ids} were never held; there were {call.runs}"
    if call.name == "lookup":
        longer = [run for run in call.runs if len(run) > len(ids) and run[: len(ids)] == ids]
        assert len(longer) < len(call.runs), "it ended too early"
        return
    claimed = call.argument.kv_block_ids
    assert claimed[: len(ids)] == ids
    one_more = claimed[: len(ids) + 1]
    assert ids == claimed or not all(run[: len(one_more)] == one_more for run in call.runs), "cut off too early"
