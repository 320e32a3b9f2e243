"""LMDeploy's own body."""

from typing import Annotated, Any, Final

import msgspec

from engines.sim.bodies.refusals import NO_EXPERTS, NO_IMAGES, NO_LOGPROBS, UNPREPARED, NotServedError, not_positive
from engines.sim.bodies.stops import Stop, stop_words
from engines.sim.endings import Ending
from engines.sim.sampling import Count, Sampled

GENERATE_TOKENS: Final = 128
"""How long an answer of ``/generate`` is where the body has no length."""


class GenerateBody(Sampled, frozen=True, kw_only=True):
    """``POST /generate``: LMDeploy's own. It names no model."""

    prompt: str | None = None
    input_ids: list[int] | None = None
    image_data: Any = None
    max_tokens: int = GENERATE_TOKENS
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    include_stop_str_in_output: bool | None = False
    stream: bool | None = False
    return_logprob: bool | None = None
    top_logprobs_num: Count | None = None
    logprob_start_len: Annotated[int, msgspec.Meta(ge=-1)] = -1
    return_routed_experts: bool | None = False
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    @property
    def model(self) -> None:
        """The one that is served."""

    @property
    def ending(self) -> Ending:
        """Where the answer ends."""
        return Ending(
            most_tokens=self.max_tokens,
            stop=stop_words(self.stop),
            stop_ids=tuple(self.stop_token_ids or ()),
            ignores_eos=bool(self.ignore_eos),
            shows_stop=bool(self.include_stop_str_in_output),
        )

    def check(self) -> None:
        """Raise ``NotServedError`` for what isn't served."""
        if (self.top_logprobs_num or 0) > 0 and not self.return_logprob:
            raise NotServedError("top_logprobs_num requires return_logprob=True.")
        if self.return_logprob:
            raise NotServedError(f"return_logprob({self.return_logprob}) {NO_LOGPROBS}.")
        if self.logprob_start_len >= 0:
            raise NotServedError("logprob_start_len requires return_logprob=True.")
        if self.return_routed_experts:
            raise NotServedError(NO_EXPERTS)
        if (self.prompt is None) is (self.input_ids is None):
            raise NotServedError("You must specify exactly one of prompt or input_ids")
        if self.prompt == "":
            raise NotServedError("The prompt must not be an empty string")
        if self.input_ids == []:
            raise NotServedError("The input_ids must not be an empty list")
        if self.image_data is not None:
            raise NotServedError(NO_IMAGES)
        self._check_ending()

    def _check_ending(self) -> None:
        if self.max_tokens < 0:
            raise NotServedError(f"The max_tokens {self.max_tokens} must be non-negative.")
        if not self.max_tokens:
            raise NotServedError(not_positive("max_tokens", 0, "integer"))
        if isinstance(self.stop, str):  # LMDeploy takes a list alone here
            raise NotServedError(UNPREPARED)
