"""How fast an engine computes prompts, as measured."""

import math

from kvcontrol.kv_policy.allowed import MOST_TOKENS, check_whole

_WEIGHT = 0.2
"""Of the newest measurement in the moving average."""
SHORT_PREFILL_TOKENS = 128


class PrefillSpeed:
    """Prefill speed: a moving average of prompt tokens per second, None until the first measurement.

    A prefill of a few tokens, as after a restored context, takes as long as a step takes at least: it says nothing of
    the speed. Such measurements count only until there is a longer one.
    """

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        self._is_rough = True

    def measured(self, tokens: int, seconds: float) -> bool:
        """Follow one prefill of ``tokens`` that took ``seconds``; False if the measurement is unusable."""
        if not (0 < tokens <= MOST_TOKENS and 0 < seconds < math.inf):
            return False
        speed, known = tokens / seconds, self.tokens_per_s
        if not 0 < speed < math.inf:
            return False
        is_short = tokens < SHORT_PREFILL_TOKENS
        if is_short and not self._is_rough:
            return False
        starts_anew = known is None or (self._is_rough and not is_short)
        self._is_rough = is_short
        self.tokens_per_s = speed if known is None or starts_anew else known + _WEIGHT * (speed - known)
        return True

    def seconds_for(self, tokens: int) -> float | None:
        """Return how long computing ``tokens`` takes; None before the first measurement. ``ValueError`` for
        what is no number of tokens.
        """
        check_whole("tokens", tokens, most=MOST_TOKENS)
        return None if self.tokens_per_s is None else tokens / self.tokens_per_s
