"""Tokens to text as they come: what an answer says doesn't depend on how many tokens arrive at once.

The engine process gathers what the api_server hasn't fetched yet, so one output may bring several tokens. LMDeploy
holds back the text of a whole output whose last token leaves a character unfinished, and drops what it holds when the
answer ends there: an answer of which all tokens came at once had no text at all. Here the unfinished character alone
waits for its rest. One that the answer's end cuts in two is left out, as before.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def detokenize_incrementally(original: Callable[..., tuple[str, Any]]) -> Callable[..., tuple[str, Any]]:
    """``HuggingFaceTokenizer.detokenize_incrementally``, in the api_server: the same text in whatever portions."""

    def detokenize_incrementally(
        self: Any, all_input_ids: Sequence[int], state: Any, *args: Any, **kwargs: Any
    ) -> tuple[str, Any]:
        shown = None if state.prev_tokens is None else len(state.prev_tokens)
        text, after = original(self, all_input_ids, state, *args, **kwargs)
        if text or len(all_input_ids) - state.ids_offset <= 1:
            return text, after
        # All of it is held back: take it again a token at a time. The list in the old state has grown meanwhile.
        after = replace(state, prev_tokens=None if shown is None else state.prev_tokens[:shown])
        ids = list(all_input_ids[: state.ids_offset])
        pieces = []
        for token_id in all_input_ids[state.ids_offset :]:
            ids.append(token_id)
            piece, after = original(self, ids, after, *args, **kwargs)
            pieces.append(piece)
        return "".join(pieces), after

    return detokenize_incrementally


__all__ = ["detokenize_incrementally"]
