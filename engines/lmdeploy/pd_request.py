"""The gateway's ticket on its way from the request header to LMDeploy's sequence, beside the tenant's salt:

    header -> middleware -> ContextVar -> GenerationConfig -> (pickled to the engine process) -> SamplingParam

and what the api_server refuses because its engine's role doesn't fit: LMDeploy would answer a whole request at a
prefill instance with one token, silently.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from kvcontrol.core.pd import PD_HEADER, Fetch, Hold, PdHeaderError, parse_pd_header
from kvcontrol.core.roles import EngineRole

_HEADER = PD_HEADER.encode()
_ATTRIBUTE = "kvgate_pd"

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

_current: ContextVar[Hold | Fetch | None] = ContextVar("kvgate_pd", default=None)


class PdHeaderMiddleware:
    """Pure ASGI: makes the request's ticket the context's, or answers 400 in OpenAI's error envelope."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            part = part_of_headers(scope["headers"])
        except PdHeaderError as error:
            await _send_400(send, str(error))
            return
        token = _current.set(part)
        try:
            await self._app(scope, receive, send)
        finally:
            _current.reset(token)


def part_of_headers(headers: list[tuple[bytes, bytes]]) -> Hold | Fetch | None:
    """Return a request's part in a separated prompt, None where it has none; raises ``PdHeaderError``."""
    values = [value for name, value in headers if name.lower() == _HEADER]
    if not values:
        return None
    if len(values) > 1:
        raise PdHeaderError(f"{PD_HEADER} is given {len(values)} times; give it once or not at all")
    return parse_pd_header(values[0].decode("latin-1"))


def part_of(carrier: Any) -> Hold | Fetch | None:
    """Return what LMDeploy's ``GenerationConfig`` or ``SamplingParam`` carries."""
    part: Hold | Fetch | None = getattr(carrier, _ATTRIBUTE, None)
    return part


def role_of(engine_config: Any) -> EngineRole:
    """Return what LMDeploy's engine configuration says that an instance is for."""
    return EngineRole(str(engine_config.role.name).lower())


def refusal(part: Hold | Fetch | None, role: EngineRole, config: Any) -> str | None:
    """Say why an instance of this role can't run a request with such a generation configuration; None when it can."""
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


def generation_config_post_init(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``GenerationConfig.__post_init__``, in the api_server: note the ticket of the request that is being handled."""

    def __post_init__(self: Any) -> None:  # noqa: N807  # it is called by this name
        original(self)
        part = _current.get()
        if part is not None:
            setattr(self, _ATTRIBUTE, part)

    return __post_init__


def sampling_param_from_gen_config(original: Any) -> Any:
    """``SamplingParam.from_gen_config``, in the engine process: carry the ticket on."""
    function = original.__func__

    def from_gen_config(cls: Any, gen_config: Any) -> Any:
        param = function(cls, gen_config)
        part = part_of(gen_config)
        if part is not None:
            setattr(param, _ATTRIBUTE, part)
        return param

    return classmethod(from_gen_config)


def preprocess(original: Callable[..., Any]) -> Callable[..., Any]:
    """``AsyncEngine.preprocess``, in the api_server: what doesn't fit the engine's role is a 400."""

    async def preprocess(
        self: Any, messages: Any, session_id: Any, gen_config: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        prepared = await original(self, messages, session_id, gen_config, *args, **kwargs)
        if not hasattr(self.backend_config, "role"):  # an engine of another kind
            return prepared
        config = prepared.gen_config
        problem = refusal(part_of(config), role_of(self.backend_config), config)
        if problem is not None:
            from lmdeploy.serve.core.exceptions import ErrorCode, RequestError

            self.session_mgr.remove(prepared.session)
            raise RequestError(ErrorCode.INVALID_REQUEST, problem)
        return prepared

    return preprocess


async def _send_400(send: _Send, message: str) -> None:
    error = {"message": message, "type": "invalid_request_error", "param": PD_HEADER, "code": "invalid_pd_header"}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


__all__ = [
    "PdHeaderMiddleware",
    "generation_config_post_init",
    "part_of",
    "part_of_headers",
    "preprocess",
    "refusal",
    "role_of",
    "sampling_param_from_gen_config",
]
