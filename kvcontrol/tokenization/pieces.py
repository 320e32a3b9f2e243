"""An encoder with a memory: a new turn of a chat costs the encoding of its new text only.

A tokenizer first cuts a text at its special tokens and encodes what lies between them piece by piece, each without a
look at its neighbours. So the ids of a text are the ids of its pieces, one after the other, with the special tokens
between them, *exactly*; and a chat template puts special tokens around every message. Remembered are pieces, by tenant
and text: all messages but the newest are found, whatever the conversation or the order.

What one tenant sent is found for that tenant only: encoding is slow enough to tell over the network whether a piece was
remembered, so a memory for all would tell anyone who guesses a text whether somebody has sent it. The tenants share
one bound in bytes. A piece's name is a digest of tenant and text under a key of this process, so a name takes the same
few bytes for any text, in any script, and the text itself is not kept.

A long piece is cut further where its vocabulary has safe places (``cuts``), which bounds what its encoding takes.

That holds where special tokens are plain (they don't swallow spaces around them and are not matched in normalised
text only) and where a piece's encoding doesn't depend on being the first. ``remembering`` checks the first and tries
out the second on hard texts; a tokenizer that fails either is used without a memory, and the reason is kept.

Rejected: remembering whole prefixes (their end has to be a place where no token can cross, which is the same special
token, and a changed first message loses everything).
"""

import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

from kvcontrol.core.hashing import TOKEN_BYTES, token_bytes
from kvcontrol.tokenization.cuts import PART_CHARS, Cuts
from kvcontrol.tokenization.encoder import MOST_OVERLAPS, TextEncoder, disagreement, overlaps

_ENTRY_BYTES = 280
"""What a remembered piece costs beside its ids: key and value objects, a place in the dictionary; measured."""
_NAME_BYTES = 16
_KEY_BYTES = 32
_TRIAL_BYTES = 1 << 20
_TRIAL_MARKERS = 3
_LARGEST_SHARE = 8
"""A piece may take an eighth of the memory at most: one huge document doesn't push everything else out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """Totals since the start; ``held_bytes`` and ``pieces`` are now."""

    hits: int
    misses: int
    hit_chars: int
    missed_chars: int
    held_bytes: int
    pieces: int


class PieceMemory:
    """Ids of pieces of text for each tenant, bounded by bytes in all, least recently used first out; any thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._lock = threading.Lock()
        self._pieces: OrderedDict[bytes, bytes] = OrderedDict()
        self._held_bytes = 0
        self._hits = self._misses = self._hit_chars = self._missed_chars = 0

    def of(self, salt: str) -> "TenantMemory":
        """Return the part of the memory that belongs to the tenant with this salt."""
        return TenantMemory(self, salt.encode(), self._key)

    def get(self, name: bytes, chars: int) -> bytes | None:
        """Return the packed ids of a piece of ``chars`` characters, None for one that isn't held."""
        with self._lock:
            ids = self._pieces.get(name)
            if ids is None:
                self._misses += 1
                self._missed_chars += chars
            else:
                self._hits += 1
                self._hit_chars += chars
                self._pieces.move_to_end(name)
            return ids

    def put(self, name: bytes, ids: bytes) -> None:
        """Remember a piece, and forget others as needed; one that is too large is not remembered."""
        size = _ENTRY_BYTES + len(ids)
        if size * _LARGEST_SHARE > self._max_bytes:
            return
        with self._lock:
            if name in self._pieces:
                return
            self._pieces[name] = ids
            self._held_bytes += size
            while self._held_bytes > self._max_bytes:
                self._held_bytes -= _ENTRY_BYTES + len(self._pieces.popitem(last=False)[1])

    def stats(self) -> MemoryStats:
        with self._lock:
            return MemoryStats(
                hits=self._hits,
                misses=self._misses,
                hit_chars=self._hit_chars,
                missed_chars=self._missed_chars,
                held_bytes=self._held_bytes,
                pieces=len(self._pieces),
            )


class TenantMemory:
    """What a ``PieceMemory`` holds for one tenant; made for each prompt, one thread at a time."""

    def __init__(self, memory: PieceMemory, salt: bytes, key: bytes) -> None:
        self._memory = memory
        self._named = blake2b(len(salt).to_bytes(8, "big") + salt, key=key, digest_size=_NAME_BYTES)

    def find(self, text: str) -> tuple[bytes, bytes | None]:
        """Return a piece's name and its packed ids, None for one that isn't held.

        Raises ``UnicodeEncodeError`` for half a surrogate pair.
        """
        state = self._named.copy()
        state.update(text.encode())
        name = state.digest()
        return name, self._memory.get(name, len(text))

    def put(self, name: bytes, ids: bytes) -> None:
        """Remember a piece by the name that ``find`` gave it."""
        self._memory.put(name, ids)


class ManyPiecesError(Exception):
    """A text has more pieces than are looked up at once."""


class Sought:
    """The ids of a text as far as they are remembered. ``complete`` says whether that is all of them: then ``ids`` is a
    join, otherwise it encodes the pieces that are missing, in whatever thread it is called in.
    """

    __slots__ = ("_encode", "_memory", "_missing", "_parts")

    def __init__(self, memory: TenantMemory, encode: Callable[[str], bytes]) -> None:
        self._memory = memory
        self._encode = encode
        self._parts: list[bytes] = []
        self._missing: list[tuple[int, bytes, str]] = []

    @property
    def complete(self) -> bool:
        return not self._missing

    @property
    def longest_chars(self) -> int:
        """The length of the longest piece that has to be encoded at once; 0 where all is remembered."""
        return max((len(text) for _, _, text in self._missing), default=0)

    def known(self, ids: bytes) -> None:
        """These come next."""
        self._parts.append(ids)

    def piece(self, text: str) -> None:
        """The ids of this piece come next; raises ``UnicodeEncodeError`` for half a surrogate pair."""
        name, ids = self._memory.find(text)
        if ids is None:
            self._missing.append((len(self._parts), name, text))
        self._parts.append(ids or b"")

    def ids(self) -> bytes:
        """Return them all."""
        made: dict[bytes, bytes] = {}
        for place, name, text in self._missing:
            if name not in made:
                made[name] = self._encode(text)
                self._memory.put(name, made[name])
            self._parts[place] = made[name]
        self._missing.clear()
        return b"".join(self._parts)


class RememberingEncoder:
    """A ``TextEncoder`` that asks another one for each piece once. Made by ``remembering``."""

    def __init__(
        self,
        encoder: TextEncoder,
        special: dict[str, int],
        memory: PieceMemory,
        *,
        cuts: Cuts | None = None,
        part_chars: int = PART_CHARS,
    ) -> None:
        """Without ``cuts`` no piece is cut further; with them one that is longer than ``part_chars``."""
        self._encoder = encoder
        self._memory = memory
        self._part_chars = part_chars
        self.cuts = cuts
        self._special = {text: token_bytes([token]) for text, token in special.items()}
        longest_first = sorted(special, key=len, reverse=True)
        self._cut = re.compile("|".join(re.escape(text) for text in longest_first))
        self._always = encoder.encode("")
        self._before, self._after = _frame(encoder, self._special, self._always)

    def encode(self, text: str, *, salt: str = "") -> bytes:
        """Return packed token ids with the help of what the tenant with this salt sent before."""
        return self.look_up(text, salt=salt).ids()

    def look_up(self, text: str, *, salt: str = "", most_pieces: int | None = None) -> Sought:
        """Return what is remembered of a text's ids; raises ``UnicodeEncodeError`` for half a surrogate pair, and
        ``ManyPiecesError`` where it has more than ``most_pieces`` special tokens.
        """
        sought = Sought(self._memory.of(salt), self._piece)
        if not text:
            sought.known(self._always)
            return sought
        sought.known(self._before)
        end = 0
        for number, found in enumerate(self._cut.finditer(text)):
            if number == most_pieces:
                raise ManyPiecesError
            if found.start() > end:
                self._seek(text[end : found.start()], sought)
            sought.known(self._special[found.group()])
            end = found.end()
        if end < len(text):
            self._seek(text[end:] if end else text, sought)
        sought.known(self._after)
        return sought

    def unframed(self, ids: bytes) -> bytes:
        """Return a text's ids without those that the tokenizer adds around it."""
        return ids[len(self._before) : len(ids) - len(self._after)]

    def _seek(self, piece: str, sought: Sought) -> None:
        if self.cuts is None or len(piece) <= self._part_chars:
            sought.piece(piece)
            return
        for part in self.cuts.parts(piece, self._part_chars):
            sought.piece(part)

    def _piece(self, text: str) -> bytes:
        return self.unframed(self._encoder.encode(text))


def _frame(encoder: TextEncoder, special: dict[str, bytes], always: bytes) -> tuple[bytes, bytes]:
    """Return what the tokenizer puts before and behind every text; raises ``ValueError`` when that can't be told."""
    for marker, token in special.items():
        if token in _tokens(always):
            continue
        whole = _tokens(encoder.encode(marker))
        if token in whole:
            place = whole.index(token)
            return b"".join(whole[:place]), b"".join(whole[place + 1 :])
    raise ValueError("no special token shows the tokens that the tokenizer adds around a text")


def _tokens(packed: bytes) -> list[bytes]:
    return [packed[start : start + TOKEN_BYTES] for start in range(0, len(packed), TOKEN_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memoryless:
    """Why an encoder can't be given a memory."""

    reason: str


def remembering(encoder: TextEncoder, backend: Any, memory: PieceMemory) -> RememberingEncoder | Memoryless:
    """Give an encoder of a Hugging Face fast tokenizer's ``backend`` a memory, or say why that can't be."""
    added = backend.get_added_tokens_decoder()
    if not added:
        return Memoryless(reason="the tokenizer has no special tokens to cut at")
    for token in added.values():
        if token.lstrip or token.rstrip or token.single_word or (token.normalized and backend.normalizer is not None):
            return Memoryless(reason=f"the special token {token.content!r} depends on what stands around it")
    special = {token.content: number for number, token in added.items()}
    try:
        candidate = RememberingEncoder(encoder, special, memory)
    except ValueError as error:
        return Memoryless(reason=str(error))
    trial = RememberingEncoder(encoder, special, PieceMemory(_TRIAL_BYTES))
    reason = _found_wrong(trial, encoder, backend)
    if reason is not None:
        return Memoryless(reason=reason)
    cuts = Cuts(backend.get_vocab(with_added_tokens=False))
    trial = RememberingEncoder(encoder, special, PieceMemory(_TRIAL_BYTES), cuts=cuts, part_chars=1)
    if disagreement(trial, encoder) is None:
        candidate.cuts = cuts
    return candidate


def _found_wrong(trial: RememberingEncoder, encoder: TextEncoder, backend: Any) -> str | None:
    """Try an encoder with a memory beside the one without, and return what is wrong with it, if anything."""
    tried = [*islice(overlaps(backend), MOST_OVERLAPS + 1)]
    if len(tried) > MOST_OVERLAPS:
        return f"special tokens overlap in more than {MOST_OVERLAPS} ways"
    wrong = next((text for text in tried if trial.encode(text) != encoder.encode(text)), None)
    if wrong is not None:
        return f"special tokens overlap: {wrong[:40]!r}"
    for token in [*backend.get_added_tokens_decoder().values()][:_TRIAL_MARKERS]:
        wrong = disagreement(_Marked(trial, token.content), _Marked(encoder, token.content))
        if wrong is not None:
            return f"a piece's tokens depend on its neighbours: {wrong[:40]!r}"
    return None


@dataclass(frozen=True, slots=True)
class _Marked:
    """Encodes a text with a special token before, within and behind it."""

    encoder: TextEncoder
    marker: str

    def encode(self, text: str) -> bytes:
        half = len(text) // 2
        return self.encoder.encode(f"{self.marker}{text[:half]}{self.marker}{text[half:]}{self.marker}\n{text}")
