"""What is replaced in the api_server's process alone."""

from engines.lmdeploy.hooks.names import MESSAGES
from engines.lmdeploy.patching import Hook

_SERVE = "lmdeploy.serve"
_PREPROCESS = (
    f"(self, messages, session_id: int | {_SERVE}.managers.session_manager.Session, "
    f"gen_config: {MESSAGES}.GenerationConfig | None = None, tools: list[object] | None = None, "
    "reasoning_effort: Optional[Literal['low', 'medium', 'high', 'max']] = None, "
    "do_preprocess: bool = True, adapter_name: str | None = None, input_ids: list | None = None, "
    "enable_thinking: bool | None = None, chat_template_kwargs: dict | None = None, "
    "media_io_kwargs: dict[str, typing.Any] | None = None, "
    "mm_processor_kwargs: dict[str, typing.Any] | None = None, **kwargs) "
    f"-> {_SERVE}.core.async_engine.PreprocessedRequest"
)


def server_hooks() -> list[Hook]:
    """In the api_server's process alone: ``/kv/v1``, our series, the salt's header, what it refuses, tokens to text."""
    return [*_admission_hooks(), *_answer_hooks(), *_life_hooks()]


def _admission_hooks() -> list[Hook]:
    from engines.lmdeploy.http import admission
    from engines.lmdeploy.pd import request as pd_request

    return [
        Hook(
            target=f"{_SERVE}.core.async_engine:AsyncEngine.preprocess",
            signature=_PREPROCESS,
            replace=admission.preprocess,
            why="every endpoint's request passes there with its tokens and final sampling",
        ),
        Hook(
            target=f"{_SERVE}.core.async_engine:AsyncEngine.preprocess",
            signature=_PREPROCESS,
            replace=pd_request.preprocess,
            why="a prefill instance answered whole requests with one token",
        ),
        Hook(
            target=f"{MESSAGES}:GenerationConfig.__post_init__",
            signature="(self)",
            replace=admission.generation_config_post_init,
            why="its assertions about a client's values became 500",
        ),
        Hook(
            target=f"{_SERVE}.utils.server_utils:validate_json_request",
            signature="(raw_request: starlette.requests.Request)",
            replace=admission.validate_json_request,
            why="fields of LMDeploy's own proxies are read from any client's raw body",
        ),
    ]


def _answer_hooks() -> list[Hook]:
    from engines.lmdeploy.http import admission, completions, detokenize

    return [
        Hook(
            target=f"{_SERVE}.openai.endpoints.completions:check_request",
            signature="(request: 'CompletionRequest', server_context) -> 'str'",
            replace=completions.check_request,
            why="a list of token ids was as many prompts, without a bound, and n was ignored",
        ),
        Hook(
            target=f"{_SERVE}.openai.endpoints.completions:with_request_cleanup",
            signature="(generator, result_generators, sessions, session_mgr)",
            replace=completions.with_request_cleanup,
            why="all answers of a streamed completion had index 0",
        ),
        Hook(
            target=f"{_SERVE}.openai.chat_completions.logits_processors:logit_bias_logits_processor",
            signature=(
                "(logit_bias: 'dict[int, float] | dict[str, float]', tokenizer: 'PreTrainedTokenizerBase') "
                "-> 'LogitsProcessor'"
            ),
            replace=admission.logit_bias_logits_processor,
            why="it returns a local function, which can't be pickled to the engine process",
        ),
        Hook(
            target="lmdeploy.tokenizer:HuggingFaceTokenizer.detokenize_incrementally",
            signature=(
                "(self, all_input_ids: collections.abc.Sequence[int], state: lmdeploy.tokenizer.DetokenizeState, "
                "skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True)"
            ),
            replace=detokenize.detokenize_incrementally,
            why="it converts the whole prompt for a stream's first text, and loses text of unfinished portions",
        ),
    ]


def _life_hooks() -> list[Hook]:
    from engines.lmdeploy.http import admin, server_sleep

    return [
        Hook(
            target="lmdeploy.serve.core.async_engine:AsyncEngine.__init__",
            signature=(
                "(self, model_path: str, model_name: str | None = None, "
                "backend: Literal['turbomind', 'pytorch'] = 'turbomind', "
                f"backend_config: {MESSAGES}.TurbomindEngineConfig | {MESSAGES}.PytorchEngineConfig | None = None, "
                "chat_template_config: lmdeploy.model.ChatTemplateConfig | None = None, "
                "max_log_len: int | None = None, "
                f"trust_remote_code: bool = False, speculative_config: {MESSAGES}.SpeculativeConfig | None = None, "
                "allowed_media_domains: list[str] | None = None, **kwargs) -> None"
            ),
            replace=admin.async_engine_init,
            why="it knows the served name before the engine process starts",
        ),
        Hook(
            target=f"{_SERVE}.core.async_engine:AsyncEngine.sleep",
            signature="(self, level: int = 1)",
            replace=server_sleep.async_engine_sleep,
            why="LMDeploy ends requests that a sleep cuts off like requests that a client aborts",
        ),
        Hook(
            target=f"{_SERVE}.core.async_engine:AsyncEngine.generate",
            signature=f"(self, request: {_SERVE}.core.async_engine.PreprocessedRequest, stream_response: bool = True)",
            replace=server_sleep.async_engine_generate,
            why="a request that a sleep cut off was answered 200 with what there was",
        ),
        Hook(
            target="lmdeploy.serve.openai.api_server:mount_metrics",
            signature="(app: 'FastAPI', backend_config: 'PytorchEngineConfig | TurbomindEngineConfig')",
            replace=admin.mount_metrics,
            why="it is given the app before it serves",
        ),
    ]
