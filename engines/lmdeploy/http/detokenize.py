"""Incremental detokenization in the api_server: the same text in whatever portions tokens arrive, at a price that
depends on the portion alone.

The text of a stream is defined as what LMDeploy's ``detokenize_incrementally`` gives when each token comes alone. Two
things differ here:

- LMDeploy converts the whole prompt to tokens, and to text twice, for the first text of an answer, and copies all
  tokens of the stream for each later one: 85 ms and 0.2 ms with a prompt of 60,000 tokens, on the event loop of all
  streams. Here the state of a stream is the prompt's last few tokens, then the tokens since the last text but one.
- The engine process gathers what the api_server hasn't fetched yet, so a portion may have several tokens. LMDeploy
  holds back the text of a portion whose last token leaves a character unfinished, and drops it when the answer ends
  there. Here the unfinished character alone waits for its rest. One that the answer's end cuts in two is left out.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

_CONTEXT_TOKENS: Final = 6
"""Of the prompt, that decide how an answer's first token is spelled; a character of UTF-8 has at most four."""
_PORTION_TOKENS: Final = 64
"""Converted at once; where a character is unfinished, broken or may still break, each token is converted alone."""
_BLANK: Final = "▁Ġ Ċĉ\t\n\r"
_BROKEN: Final = "�"

# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def detokenize_incrementally(original: Callable[..., tuple[str, Any]]) -> Callable[..., tuple[str, Any]]:
    """``HuggingFaceTokenizer.detokenize_incrementally``, in the api_server.

    O(new tokens + tokens whose text is held back), whatever the prompt's length. A prompt that ends in a long run of
    byte-fallback tokens, blanks or special tokens is an exception: the first text looks back to the run's begin.
    """

    def detokenize_incrementally(
        self: Any,
        all_input_ids: Sequence[int],
        state: Any,
        skip_special_tokens: bool = True,  # noqa: FBT001, FBT002 - LMDeploy's
        spaces_between_special_tokens: bool = True,  # noqa: FBT001, FBT002
    ) -> tuple[str, Any]:
        def convert(ids: Sequence[int], tail: list[Any], read: int) -> tuple[str, list[Any], int]:
            """Return the text of ``ids`` after ``tail``, of which ``read`` tokens have been shown, and both anew."""
            fed = type(state)(0, list(tail), 0, read)
            text, after = original(self, ids, fed, skip_special_tokens, spaces_between_special_tokens)
            return text, after.prev_tokens[after.prefix_offset :], after.read_offset - after.prefix_offset

        tail, read = state.prev_tokens, state.read_offset
        if tail is None:
            tail = _context(self.model, all_input_ids, state.ids_offset, skip_special_tokens=skip_special_tokens)
            read = len(tail)
        texts = []
        for start in range(state.ids_offset, len(all_input_ids), _PORTION_TOKENS):
            ids = all_input_ids[start : start + _PORTION_TOKENS]
            text, after_tail, after_read = convert(ids, tail, read)
            if len(ids) == 1 or (text and _BROKEN not in text and not _is_byte(after_tail[-1])):
                texts.append(text)
                tail, read = after_tail, after_read
                continue
            for token_id in ids:
                text, tail, read = convert((token_id,), tail, read)
                texts.append(text)
        return "".join(texts), type(state)(len(all_input_ids), tail, 0, read)

    return detokenize_incrementally


def _context(tokenizer: Any, ids: Sequence[int], end: int, *, skip_special_tokens: bool) -> list[Any]:
    """Return the last tokens of ``ids[:end]``, at least ``_CONTEXT_TOKENS`` where there are as many.

    What comes before them must not change how text after them is spelled: so they begin neither within a run of
    byte-fallback tokens, which are spelled together, nor with blanks, which some tokenizers strip.
    """
    looked_at = 2 * _CONTEXT_TOKENS
    while True:
        start = max(0, end - looked_at)
        converted = tokenizer.convert_ids_to_tokens(ids[start:end], skip_special_tokens=skip_special_tokens)
        tokens = [token for token in converted or () if token is not None]  # None: not in the vocabulary
        if start == 0:
            return tokens
        first = next((place for place, token in enumerate(tokens) if _may_begin(token)), len(tokens))
        if len(tokens) - first >= _CONTEXT_TOKENS:
            return tokens[first:]
        looked_at *= 2


def _may_begin(token: Any) -> bool:
    return not isinstance(token, str) or (not _is_byte(token) and bool(token.strip(_BLANK)))


def _is_byte(token: Any) -> bool:
    """Whether a token may be part of a run that is broken as a whole when one byte of it is."""
    return isinstance(token, str) and token.startswith("<0x")
