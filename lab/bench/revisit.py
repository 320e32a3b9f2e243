"""What a cached prefix is worth: several chats take turns, so that each turn finds its own past cached, or doesn't.

All conversations advance one turn in each round, in a fresh random order (a fixed order would let a round-robin router
look sticky). From the second turn on, everything but the newest message was computed before. Compared are the time to
the first token of first turns (cold) and of later turns (revisits), and, with a second gateway over the same engines,
the same work routed by it; the two targets alternate turn by turn and share no prefix. The two are compared by their
means: a router that misses half of the time has the same median as one that never does.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from lab.bench.timed_chat import ANSWER_LIMIT_S, TimedAnswer, chat, first_model
from lab.driver.chats import Message
from lab.driver.target import Target

NAME = "revisit"

_PROSE = (
    "river stone market winter engine garden letter window silver music table forest captain history morning bridge "
    "paper harbour question summer doctor village mountain kitchen science picture journey island teacher evening"
)
_WORDS = _PROSE.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisitPlan:
    """``first_words`` is the length of the first message, ``turn_words`` of each later one."""

    conversations: int = 4
    turns: int = 4
    first_words: int = 400
    turn_words: int = 30
    max_tokens: int = 16
    seed: int = 0


@dataclass(slots=True)
class _Conversation:
    messages: list[Message]
    answers: list[TimedAnswer] = field(default_factory=list)


async def run(urls: Sequence[str], plan: RevisitPlan) -> dict[str, float]:
    """Drive one or two gateways and return metrics by name; raises ``BenchmarkError`` when a request fails.

    With two, the first is the one under test and the second the baseline.
    """
    rng = random.Random(plan.seed)  # noqa: S311 - reproducible text, not a secret
    async with aiohttp.ClientSession() as session:
        targets = [Target(url=url, model=await first_model(session, url), timeout_s=ANSWER_LIMIT_S) for url in urls]
        groups = [[_conversation(rng, plan) for _ in range(plan.conversations)] for _ in urls]
        for turn in range(plan.turns):
            order = [(target, index) for index in range(plan.conversations) for target in range(len(urls))]
            rng.shuffle(order)
            for target, index in order:
                talk = groups[target][index]
                if turn:
                    talk.messages.append({"role": "user", "content": _text(rng, plan.turn_words)})
                answer = await chat(session, targets[target], talk.messages, plan.max_tokens)
                talk.answers.append(answer)
                talk.messages.append({"role": "assistant", "content": answer.text})
    metrics = _metrics(groups[0])
    if len(urls) > 1:
        baseline = _metrics(groups[1])
        metrics |= {f"baseline_{name}": value for name, value in baseline.items()}
        metrics["ttft_revisit_mean_speedup_over_baseline"] = (
            baseline["ttft_revisit_mean_s"] / metrics["ttft_revisit_mean_s"]
        )
    return metrics


def _conversation(rng: random.Random, plan: RevisitPlan) -> _Conversation:
    nonce = f"{rng.getrandbits(64):016x}"
    return _Conversation(messages=[{"role": "user", "content": f"{nonce} {_text(rng, plan.first_words)}"}])


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))


def _metrics(group: Sequence[_Conversation]) -> dict[str, float]:
    cold = [talk.answers[0] for talk in group]
    again = [answer for talk in group for answer in talk.answers[1:]]
    both = [*cold, *again]
    metrics = {
        "ttft_cold_p50_s": statistics.median(a.ttft_s for a in cold),
        "prompt_cold_p50_tokens": statistics.median(a.prompt_tokens for a in cold),
        "decode_p50_tokens_per_s": statistics.median(a.decode_tokens_per_s for a in both),
    }
    if again:
        metrics |= {
            "ttft_revisit_p50_s": statistics.median(a.ttft_s for a in again),
            "ttft_revisit_mean_s": statistics.fmean(a.ttft_s for a in again),
            "ttft_revisit_max_s": max(a.ttft_s for a in again),
            "prompt_revisit_p50_tokens": statistics.median(a.prompt_tokens for a in again),
            "cached_share_of_revisited_tokens": sum(a.cached_tokens for a in again)
            / sum(a.prompt_tokens for a in again),
            "predicted_equals_cached_share": sum(a.matched_tokens == a.cached_tokens for a in both) / len(both),
            "ttft_speedup_of_revisit": statistics.median(a.ttft_s for a in cold)
            / statistics.median(a.ttft_s for a in again),
        }
    return metrics
