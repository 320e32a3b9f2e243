"""The gateway's ticket, which a request's headers contain and LMDeploy carries to its sequence, and what the api_server
refuses because its engine's role doesn't fit: LMDeploy would answer a whole request at a prefill instance
with one token, silently.
"""

from collections.abc import Callable
from typing import Any, Final

from engines.lmdeploy.http.carried import Carried
from engines.lmdeploy.settings import EngineSettings, PdTransport
from engines.requests.headers import HeaderError, Headers, HeaderValue, single
from kvcontrol.core.pd import PD_HEADER, Fetch, Hold, Load, PdDuty, PdHeaderError, Save, parse_pd_header
from kvcontrol.core.roles import EngineRole


class PdRequestError(HeaderError):
    """The ticket's header is invalid; the message never repeats a ticket."""

    code = "invalid_pd_header"


def part_of_headers(headers: Headers) -> PdDuty | None:
    """Return a request's part in a separated prompt, None where it has none; raises ``PdRequestError``."""
    value = single(headers, PD_HEADER, PdRequestError)
    if value is None:
        return None
    try:
        return parse_pd_header(value.decode("latin-1"))
    except PdHeaderError as error:
        raise PdRequestError(PD_HEADER, str(error).removeprefix(f"{PD_HEADER} ")) from error


PART: Final[HeaderValue[PdDuty | None]] = HeaderValue("kvgate_pd", absent=None, read=part_of_headers)
CARRIED_PART: Final = Carried("kvgate_pd", PART)


def part_of(carrier: Any) -> PdDuty | None:
    """Return the ticket in LMDeploy's ``GenerationConfig`` or ``SamplingParam``."""
    return CARRIED_PART.of(carrier)


def role_of(engine_config: Any) -> EngineRole:
    """Return the role in LMDeploy's engine configuration."""
    return EngineRole(str(engine_config.role.name).lower())


def refusal(part: PdDuty | None, role: EngineRole, config: Any, *, shares_tiers: bool) -> str | None:
    """Return why an instance of this role can't run a request with such a configuration; None if it can."""
    if not isinstance(part, Save | Load):
        return _migration_refusal(part, role, config)
    if shares_tiers:
        return None
    return "this instance hands no prompts over through its tiers; start it with KVGATE_ENGINE_PD_TRANSPORT=tiers"


def _migration_refusal(part: Hold | Fetch | None, role: EngineRole, config: Any) -> str | None:
    if isinstance(part, Hold) and role is not EngineRole.PREFILL:
        return f"this is a {role} instance: it holds no prompt for another; start it with --role Prefill"
    if isinstance(part, Fetch) and role is not EngineRole.DECODE:
        return f"this is a {role} instance: it takes over no prompt from another; start it with --role Decode"
    if part is None:
        if role is EngineRole.PREFILL and config.max_new_tokens > 1:
            return "this instance only prefills: ask a hybrid or decode instance, or the gateway"
        return None
    if config.logprobs is not None or config.response_format is not None or config.logits_processors:
        return "logprobs and guided or biased decoding are not served here: the first token is made elsewhere"
    return None


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def preprocess(original: Callable[..., Any]) -> Callable[..., Any]:
    """``AsyncEngine.preprocess``, in the api_server: what doesn't fit the engine's role is a 400; a prompt that is
    computed for another is answered with one token.
    """
    shares_tiers = EngineSettings.load().pd_transport is PdTransport.TIERS

    async def preprocess(
        self: Any, messages: Any, session_id: Any, gen_config: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        prepared = await original(self, messages, session_id, gen_config, *args, **kwargs)
        if not hasattr(self.backend_config, "role"):  # an engine of another kind
            return prepared
        config = prepared.gen_config
        part = part_of(config)
        problem = refusal(part, role_of(self.backend_config), config, shares_tiers=shares_tiers)
        if problem is not None:
            from lmdeploy.serve.core.exceptions import ErrorCode, RequestError

            self.session_mgr.remove(prepared.session)
            raise RequestError(ErrorCode.INVALID_REQUEST, problem)
        if isinstance(part, Save):
            config.max_new_tokens, config.min_new_tokens = 1, None
        return prepared

    return preprocess
