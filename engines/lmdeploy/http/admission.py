"""What stands between a client's request and LMDeploy's engine loop: a check at each end of the process boundary.

The api_server refuses with 400 and a message that names the field (``AsyncEngine.preprocess``, where every endpoint's
request passes with its tokens and its final sampling). The engine process checks the same again, for what took another
way, and answers that one request alone with an error. The rules are in ``engines/requests/limits.py``.
"""

import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response

from engines.lmdeploy.pd.transport import transport_of
from engines.lmdeploy.settings import EngineSettings, PdTransport
from engines.requests.limits import EngineLimits, RefusedError, Sampling, TooLongError, check_ids, check_prompt, settle

_logger = logging.getLogger("lmdeploy.kvgate")
_LIMITS = "kvgate_limits"
_TICKETS_ONLY = "kvgate_tickets_only"
_BETWEEN_ENGINES = ("migration_request", "with_cache", "preserve_cache")


class LogitBias:
    """A logits processor that can be sent to the engine process: adds a bias to some tokens' logits."""

    def __init__(self, bias: dict[int, float]) -> None:
        self.bias = bias

    def __call__(self, _token_ids: Any, logits: Any) -> Any:
        for token_id, bias in self.bias.items():
            logits[token_id] += bias
        return logits


def limits_of(async_engine: Any) -> EngineLimits | None:
    """Return the limits of the engine behind an ``AsyncEngine``, None for an engine of another kind."""
    limits: EngineLimits | None = getattr(async_engine.backend_config, _LIMITS, None)
    return limits


def mount(app: FastAPI, engine_config: Any) -> None:
    """Let ``app`` render a refusal wherever in a handler it is raised, and know the role of its engine."""
    from lmdeploy.pytorch.disagg.config import EngineRole
    from lmdeploy.serve.core.exceptions import RequestError
    from lmdeploy.serve.utils.server_utils import protocol_error_response

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)  # noqa: S101 - what it is registered for
        response: Response = protocol_error_response(request.url.path, error)
        return response

    app.add_exception_handler(RequestError, refused)
    hands_over_natively = (
        engine_config.role is not EngineRole.Hybrid
        and transport_of(EngineSettings.load(), engine_config.device_type) is PdTransport.NATIVE
    )
    setattr(app.state, _TICKETS_ONLY, not hands_over_natively)


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def get_engine_config(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``Engine.get_engine_config``, in the engine process: the answer to the api_server carries the engine's limits."""

    def get_engine_config(self: Any) -> Any:
        config = original(self)
        setattr(config, _LIMITS, _limits_of(self))
        return config

    return get_engine_config


def preprocess(original: Callable[..., Any]) -> Callable[..., Any]:
    """``AsyncEngine.preprocess``, in the api_server: what the engine can't run is a 400."""

    async def preprocess(
        self: Any, messages: Any, session_id: Any, gen_config: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        limits = limits_of(self)
        if isinstance(messages, list) and messages and not isinstance(messages[0], dict):  # token ids to complete
            messages, kwargs["input_ids"] = None, messages
        if limits is None:  # an engine of another kind
            return await original(self, messages, session_id, gen_config, *args, **kwargs)
        try:
            if gen_config is not None:
                for field in ("stop_token_ids", "bad_token_ids"):
                    check_ids(field, getattr(gen_config, field) or (), limits)
            if (input_ids := kwargs.get("input_ids")) is not None:
                check_prompt(input_ids, limits)
        except RefusedError as error:
            self.session_mgr.remove(session_id)
            raise _bad_request(error) from error
        prepared = await original(self, messages, session_id, gen_config, *args, **kwargs)
        config = prepared.gen_config
        try:
            _check_adapter(prepared.adapter_name, self.backend_config)
            _check_prompt_logprobs(config.logprob_start_len)
            check_prompt(prepared.inputs["input_ids"], limits)
            sampling = Sampling(
                top_k=config.top_k,
                top_p=config.top_p,
                min_p=config.min_p,
                temperature=config.temperature,
                repetition_penalty=config.repetition_penalty,
                min_new_tokens=config.min_new_tokens or 0,
                max_new_tokens=config.max_new_tokens,
                logprobs=-1 if config.logprobs is None else config.logprobs,
                stop_ids=config.stop_token_ids or [],
                bad_ids=config.bad_token_ids or [],
                ngram_size=config.repetition_ngram_size,
                ngram_threshold=config.repetition_ngram_threshold,
                bias_ids=_bias_ids(config.logits_processors),
                ignore_eos=config.ignore_eos,
            )
            settle(sampling, limits, prompt_tokens=prepared.input_token_len)
        except RefusedError as error:
            self.session_mgr.remove(prepared.session)
            raise _bad_request(error) from error
        config.top_k, config.temperature = sampling.top_k, sampling.temperature
        config.max_new_tokens = sampling.max_new_tokens
        config.stop_token_ids, config.bad_token_ids = sampling.stop_ids, sampling.bad_ids or None
        return prepared

    return preprocess


def on_add_message(original: Callable[..., None]) -> Callable[..., None]:
    """``Engine._on_add_message``, in the engine process: a request that can't be run harms no other."""

    def _on_add_message(self: Any, reqs: list[Any], **kwargs: Any) -> None:
        from lmdeploy.pytorch.engine.request import ResponseType

        limits = _limits_of(self)
        for req in reqs:
            session_id = req.data["session_id"]
            try:
                _check_engine_request(req.data, limits, self.engine_config)
            except RefusedError as error:
                _logger.warning("session[%s] is refused: %s", session_id, error)
                self._response(req.resp, ResponseType.NOT_SUPPORTED)
                continue
            try:
                original(self, [req], **kwargs)
            except Exception:  # whatever it is, it is this request's alone
                _logger.exception("session[%s] could not be added", session_id)
                if self.scheduler.get_session(session_id) is not None:
                    self.end_session(session_id)
                self._response(req.resp, ResponseType.INTERNAL_ENGINE_ERROR)

    return _on_add_message


def filter_repetition_ngram(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_filter_repetition_ngram_``, in the engine process: a row without stop tokens has nothing to end on.

    Its place in the batch's stop tokens is padded with -1, which LMDeploy uses as an index.
    """

    def _filter_repetition_ngram_(scores: Any, stop_words: Any, *args: Any, **kwargs: Any) -> Any:
        if stop_words is None or stop_words.numel() == 0:
            return original(scores, stop_words, *args, **kwargs)
        filtered = original(scores.clone(), stop_words.clamp(min=0), *args, **kwargs)
        return filtered.where(stop_words[:, :1] >= 0, scores)

    return _filter_repetition_ngram_


def generation_config_post_init(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``GenerationConfig.__post_init__``, in the api_server: its assertions about a client's values are 400s."""

    def __post_init__(self: Any) -> None:  # noqa: N807  # it is called by this name
        try:
            original(self)
        except (AssertionError, TypeError, ValueError) as error:
            detail = str(error) or f"top_p {self.top_p!r} must be in [0, 1], temperature {self.temperature!r} in [0, 2]"
            raise _bad_request(detail) from error

    return __post_init__


def validate_json_request(original: Callable[[Request], None]) -> Callable[[Request], Any]:
    """``validate_json_request``, what every endpoint with a JSON body depends on: check what isn't in its model."""

    async def validate_json_request(raw_request: Request) -> None:
        original(raw_request)
        if not await raw_request.body():  # a route whose fields are in its query
            return
        try:
            body = await raw_request.json()  # kept by the request, so that nothing is parsed twice
        except (ValueError, RecursionError) as error:
            raise _bad_request(f"the request body is not JSON: {error}") from error
        if not isinstance(body, dict):
            return
        if getattr(raw_request.app.state, _TICKETS_ONLY, False):
            for field in _BETWEEN_ENGINES:
                if body.get(field) not in (None, False):
                    raise _bad_request(f"{field} is not allowed: KV cache changes hands by the gateway's ticket alone")
        if "n" in body and body["n"] is None and "prompt" in body:
            raise _bad_request("n is null; leave it out, or give a positive number")
        if body.get("prompt") == []:
            raise _bad_request("prompt is an empty list; at least one prompt is required")

    return validate_json_request


def logit_bias_logits_processor(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], LogitBias]:
    """``logit_bias_logits_processor``: LMDeploy's is a local function, which can't be sent to the engine process."""

    def logit_bias_logits_processor(logit_bias: dict[str, float], tokenizer: Any) -> LogitBias:
        [checked] = original(logit_bias, tokenizer).args
        return LogitBias(checked)

    return logit_bias_logits_processor


def _check_engine_request(data: dict[str, Any], limits: EngineLimits, engine_config: Any) -> None:
    """Raise ``RefusedError`` for what would end the engine's loop; bring the rest into range."""
    _check_adapter(data["adapter_name"], engine_config)
    check_prompt(data["token_ids"], limits)
    param = data["sampling_param"]
    sampling = Sampling(
        top_k=param.top_k,
        top_p=param.top_p,
        min_p=param.min_p,
        temperature=param.temperature,
        repetition_penalty=param.repetition_penalty,
        min_new_tokens=param.min_new_tokens,
        max_new_tokens=param.max_new_tokens,
        logprobs=param.num_logprobs,
        stop_ids=param.stop_words,
        bad_ids=param.bad_words,
        ngram_size=param.repetition_ngram_size,
        ngram_threshold=param.repetition_ngram_threshold,
        bias_ids=_bias_ids(param.logits_processors),
        ignore_eos=param.ignore_eos,
    )
    settle(sampling, limits, prompt_tokens=len(data["token_ids"]))
    param.top_k, param.temperature = sampling.top_k, sampling.temperature
    param.max_new_tokens = sampling.max_new_tokens
    param.stop_words, param.bad_words = sampling.stop_ids, sampling.bad_ids


def _check_adapter(name: str | None, engine_config: Any) -> None:
    adapters = engine_config.adapters or {}
    if name is not None and name not in adapters:
        raise RefusedError(f"there is no adapter {name!r}; this instance has {sorted(adapters) or 'none'}")


def _check_prompt_logprobs(start: int) -> None:
    """A prefill alone, beside others that decode: LMDeploy's model agent then loses count of the batch."""
    if start >= 0:
        raise RefusedError("logprob_start_len is not served: logprobs of a prompt can end an engine that decodes")


def _bias_ids(processors: list[Any] | None) -> list[int]:
    return [token_id for each in processors or () if isinstance(each, LogitBias) for token_id in each.bias]


def _bad_request(detail: object) -> Exception:
    from lmdeploy.serve.core.exceptions import ErrorCode, RequestError

    code = ErrorCode.CONTEXT_LENGTH_EXCEEDED if isinstance(detail, TooLongError) else ErrorCode.INVALID_REQUEST
    error: Exception = RequestError(code, str(detail))
    return error


def _limits_of(engine: Any) -> EngineLimits:
    from lmdeploy.pytorch import envs

    return EngineLimits(
        vocab_tokens=int(engine.model_config.vocab_size),
        context_tokens=int(engine.max_session_len),
        repetition_window_tokens=int(envs.repetition_window_size),
    )
