"""What is to be asked: the requests of a trace, at the times and lengths that were chosen."""

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvcontrol.traces import OPENER, BlockTexts, SynthesisError, TextMaker, Words
from kvgate.failure import CommandError
from lab.traces import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """``scale`` multiplies the trace's lengths; answers are ``output_tokens`` long where it doesn't say how long.

    ``leave_out_long`` leaves out the requests that the model's context has no room for.
    """

    scale: float = 1.0
    leave_out_long: bool = False
    output_tokens: int = 64
    most_output_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When requests are sent. By their times, ``speed`` times as fast or ``rate`` of them a second in the mean (open
    loop); or by ``users`` who each wait for their answer and ``think_s`` more before they go on (closed loop).
    """

    speed: float = 1.0
    rate: float | None = None
    users: int | None = None
    think_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request: due ``at_s`` after the start, with so many tokens with the chat template's and in the answer.

    ``reusable_tokens`` are those that a cache without bounds would have of the requests before it.
    """

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    reusable_tokens: int
    session: str
    block_ids: "array[int]"


class Work:
    """All that is planned. Texts are made when they are sent: all of them at once would be gigabytes."""

    def __init__(
        self, requests: Sequence[Planned], words: Words, *, block_tokens: int, seed: int, left_out: int
    ) -> None:
        numbers: dict[int, int] = {}
        for each in requests:
            for block in each.block_ids:
                numbers.setdefault(block, len(numbers))
        maker = TextMaker(words.words, seed=seed)
        self._texts = BlockTexts(maker, numbers, block_tokens=block_tokens)
        self.template_tokens = words.message_tokens
        """Tokens of the chat template and of the opener, with which every prompt begins."""
        self.requests = requests
        self.left_out = left_out
        self.block_tokens = block_tokens
        """Tokens of a block of the trace, scaled; 1 where its requests have none."""

    def content(self, planned: Planned) -> str:
        """Return the text of its message; the opener and the chat template are among its tokens."""
        tokens = planned.prompt_tokens - self.template_tokens
        return OPENER + self._texts.content(planned.block_ids, tokens, tail=planned.number)


def plan(
    requests: Sequence[Request],
    words: Words,
    *,
    lengths: Lengths,
    pace: Pace,
    seed: int = 0,
) -> Work:
    """Return the work of these requests, which are ordered by time.

    Raises ``CommandError`` when they don't fit the model's context and aren't to be left out, when blocks get too
    short, or when they need gaps between their times and have none.
    """
    sized = [_sized(request, words, lengths) for request in requests]
    fitting = [each for each in sized if each.fits(words.context_tokens)]
    if len(fitting) < len(sized) and not lengths.leave_out_long:
        raise _too_long(sized, len(fitting), words.context_tokens or 0, lengths)
    if not sized:
        raise CommandError("the trace has no request")
    if not fitting:
        raise CommandError(f"none of the {len(sized)} requests is to be sent", "none fits the model's context")
    try:
        return Work(
            list(_planned(fitting, pace)),
            words,
            block_tokens=max(each.block_tokens for each in fitting),
            seed=seed,
            left_out=len(sized) - len(fitting),
        )
    except SynthesisError as error:
        raise CommandError(f"--scale-length {lengths.scale}: {error}", "give a larger --scale-length") from error


@dataclass(frozen=True, slots=True)
class _Sized:
    """A request and its lengths as they are asked for, in tokens."""

    request: Request
    block_tokens: int
    prompt_tokens: int
    output_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def fits(self, context_tokens: int | None) -> bool:
        return context_tokens is None or self.total_tokens <= context_tokens


def _sized(request: Request, words: Words, lengths: Lengths) -> _Sized:
    block = request.block_tokens
    scaled_block = max(1, round(block * lengths.scale))
    if block > 1:
        # By whole blocks, so that what is shared stays whole blocks.
        whole, rest = divmod(request.prompt_tokens, block)
        tokens = whole * scaled_block + round(rest * scaled_block / block)
    else:
        tokens = round(request.prompt_tokens * lengths.scale)
    output = lengths.output_tokens
    if request.output_tokens is not None:
        output = max(1, round(request.output_tokens * lengths.scale))
    if lengths.most_output_tokens is not None:
        output = min(output, lengths.most_output_tokens)
    return _Sized(request, scaled_block, max(tokens, words.message_tokens + 1), output)


def _planned(sized: Sequence[_Sized], pace: Pace) -> Iterator[Planned]:
    begin_s = sized[0].request.at_s
    faster = _faster(sized, pace)
    seen: set[int] = set()
    for number, each in enumerate(sized):
        ids = each.request.block_ids
        found = sum(1 for _ in takewhile(seen.__contains__, ids))
        seen.update(ids)
        yield Planned(
            number=number,
            at_s=(each.request.at_s - begin_s) / faster,
            prompt_tokens=each.prompt_tokens,
            output_tokens=each.output_tokens,
            reusable_tokens=min(found * each.block_tokens, each.prompt_tokens),
            session=each.request.session,
            block_ids=ids,
        )


def _faster(sized: Sequence[_Sized], pace: Pace) -> float:
    if pace.rate is None:
        return pace.speed
    if len(sized) == 1:
        return 1.0  # it is due at once, at whatever rate
    span_s = sized[-1].request.at_s - sized[0].request.at_s
    if span_s <= 0:
        raise CommandError(
            f"--rate: all {len(sized)} requests to be sent come at one moment of the trace "
            f"({sized[0].request.at_s:g} s), so there are no gaps to give a rate",
            "take in requests that come later (a larger --limit), or --users N sends one after another instead",
        )
    return pace.rate * span_s / (len(sized) - 1)


def _too_long(sized: Sequence[_Sized], fitting: int, context_tokens: int, lengths: Lengths) -> CommandError:
    longest = max(each.total_tokens for each in sized)
    scale = math.floor(lengths.scale * context_tokens / longest * 0.99 * 1e6) / 1e6
    return CommandError(
        f"{len(sized) - fitting} of {len(sized)} requests are longer than the model's context of {context_tokens} "
        f"tokens; the longest has {longest}",
        f"--scale-length {scale} fits all of them, --leave-out-long leaves the long ones out",
    )
