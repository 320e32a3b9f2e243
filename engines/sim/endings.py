"""An answer, and where it ends: by LMDeploy's rules, at a stop token or when it is as long as it may be.

The token that ends an answer is generated like any other, and isn't told unless the client wants it. Stop tokens that
may not come yet (``min_new_tokens``), or at all (``ignore_eos``), are never generated.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from engines.requests.limits import EngineLimits, RefusedError, Sampling, check_ids, check_prompt, settle
from engines.sim.text import SimTokenizer

_REPETITION_WINDOW: Final = 1 << 20
"""Repetition changes nothing here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What a body says of where its answer ends. LMDeploy reads on each route what that has a field for.

    ``most_tokens`` is None where the client doesn't say; ``shows_stop``: the token that ended it is told, too.
    """

    most_tokens: int | None
    least_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignores_eos: bool = False
    shows_stop: bool = False


class Drawn(NamedTuple):
    """``generated`` tokens are the engine's work, ``words`` are told as they come, ``last`` with the end."""

    generated: list[int]
    words: list[int]
    last: list[int]
    reason: str


class Answers:
    """Draws them. ``answer_tokens`` is an answer's length where the client says none, ``capacity_tokens`` that of the
    longest prompt with its answer.
    """

    def __init__(self, tokenizer: SimTokenizer, *, seed: int, answer_tokens: int, capacity_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._answer_tokens = answer_tokens
        self._limits = EngineLimits(
            vocab_tokens=tokenizer.vocab_tokens,
            context_tokens=capacity_tokens,
            repetition_window_tokens=_REPETITION_WINDOW,
        )

    def draw(self, prompt: list[int], ending: Ending, *, choice: int = 0) -> Drawn:
        """Return an answer; the same to the same prompt. Raises ``RefusedError`` or ``TextError``."""
        stop = self._stop(ending)
        check_prompt(prompt, self._limits)
        capacity = self._limits.context_tokens - len(prompt)
        if capacity < 1:
            raise RefusedError(
                f"Input length ({len(prompt)}) must be smaller than the model context length"
                f" ({self._limits.context_tokens})."
            )
        sampling = _sampling(ending, stop, most_tokens=capacity if ending.most_tokens is None else ending.most_tokens)
        settle(sampling, self._limits, prompt_tokens=len(prompt))
        most = length = sampling.max_new_tokens
        ends = ending.most_tokens is None and not ending.ignores_eos
        if ends:
            length = min(most, max(self._answer_tokens, ending.least_tokens))
        seed = f"{self._seed} {hash(tuple(prompt))}" + (f" {choice}" if choice else "")
        until = length if ending.ignores_eos else ending.least_tokens
        tokens = self._tokenizer.answer(seed, length, without=stop, until=until)
        place = None if ending.ignores_eos else _first(tokens, stop, ending.least_tokens)
        if place is not None:
            return _stopped(tokens[: place + 1], shown=ending.shows_stop)
        end = self._tokenizer.end_token
        if ends and length < most and end is not None:
            return _stopped([*tokens, end], shown=ending.shows_stop)
        return Drawn(tokens, tokens, [], "stop" if ends and length < most else "length")

    def _stop(self, ending: Ending) -> frozenset[int]:
        """The tokens that end an answer: those of the words, those that are named, and the model's own."""
        check_ids("stop_token_ids", ending.stop_ids, self._limits)
        end = self._tokenizer.end_token
        named = frozenset(ending.stop_ids if end is None else (*ending.stop_ids, end))
        return named.union(*map(self._tokenizer.stop_tokens, ending.stop))


def _first(tokens: list[int], stop: frozenset[int], least: int) -> int | None:
    return next((place for place, token in enumerate(tokens[least:], least) if token in stop), None)


def _stopped(tokens: list[int], *, shown: bool) -> Drawn:
    return Drawn(tokens, tokens[:-1], tokens[-1:] if shown else [], "stop")


def _sampling(ending: Ending, stop: frozenset[int], *, most_tokens: int) -> Sampling:
    """What LMDeploy would be asked for, as far as it changes anything here."""
    return Sampling(
        top_k=1,
        top_p=1.0,
        min_p=0.0,
        temperature=1.0,
        repetition_penalty=1.0,
        min_new_tokens=ending.least_tokens,
        max_new_tokens=most_tokens,
        logprobs=-1,
        stop_ids=list(stop),
        bad_ids=[],
        ngram_size=0,
        ngram_threshold=0,
        bias_ids=[],
        ignore_eos=ending.ignores_eos,
    )
