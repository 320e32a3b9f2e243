"""Places at which a long text can be cut: the tokens of the text are those of its parts, one after the other.

To encode a text takes 30 to 230 times its bytes, whatever library does it. In parts of ``PART_CHARS`` it takes that of
one part, and the ids.

Two kinds of places are tried: before a space between two words, and behind a line break between two lines. A place is
safe where no token of the vocabulary reaches across it: no merge of a BPE and no path of a Unigram model does then.
Where the text is split into words before is up to the tokenizer; ``pieces`` tries that out on texts that are hard to
get right.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Final

PART_CHARS: Final = 1 << 16

_KINDS: Final = (
    # the place, and what a token that reaches across it contains, as vocabularies spell spaces and line breaks
    (r"(?<=[A-Za-z])(?= [A-Za-z])", re.compile(r"[A-Za-z][ Ġ▁]")),
    (r"(?<=\S\n)(?=[^\W\d_])", re.compile(r"[\nĊ][^\sĊĠĉč▁]")),
)


class Cuts:
    """The places that are safe with a vocabulary; immutable."""

    def __init__(self, vocabulary: Iterable[str]) -> None:
        tokens = list(vocabulary)
        kinds = [place for place, across in _KINDS if not any(across.search(token) for token in tokens)]
        self._places = re.compile("|".join(kinds)) if kinds else None

    def parts(self, text: str, least_chars: int = PART_CHARS) -> Iterator[str]:
        """Give the parts of a text, each but the last with at least so many characters: it goes on to the next place.
        O(len(text)).
        """
        start = 0
        while self._places is not None and start + least_chars < len(text):
            found = self._places.search(text, start + least_chars)
            if found is None:
                break
            yield text[start : found.start()]
            start = found.start()
        yield text[start:]
