"""Hooks that keep the host ahead of the device, and warm up an engine at its start."""

from engines.lmdeploy.patching import Hook


def host_hooks() -> list[Hook]:
    """In the engine process: the CUDA graphs captured and the kernels compiled at start."""
    from engines.lmdeploy import graphs, warm_start

    return [
        Hook(
            target="lmdeploy.pytorch.config:normalize_cudagraph_capture_batch_sizes",
            signature="(capture_sizes: list[int] | None, max_batches: int) -> list[int] | None",
            replace=graphs.normalize_capture_sizes,
            why="six running requests compute as eight",
        ),
        Hook(
            target="lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent.warmup",
            signature="(self)",
            replace=graphs.agent_warmup,
            why="what graphs take at start is in no log",
        ),
        Hook(
            target="lmdeploy.pytorch.engine.mp_engine.zmq_engine:ZMQMPEngine._mp_proc_async",
            signature="(server, engine: 'Engine')",
            replace=warm_start.engine_process_async,
            why="first requests compile kernels",
        ),
    ]


def prompt_hooks() -> list[Hook]:
    """In the api_server's process: prompts are tokenized off its event loop."""
    from engines.lmdeploy.http import prompts, token_routes

    processor = "lmdeploy.serve.processors.multimodal:MultimodalProcessor"
    return [
        Hook(
            target=f"{processor}.__init__",
            signature=(
                "(self, tokenizer: lmdeploy.tokenizer.Tokenizer, chat_template: lmdeploy.model.BaseChatTemplate, "
                "vl_encoder=None, backend: str | None = None, allowed_media_domains: list[str] | None = None)"
            ),
            replace=prompts.processor_init,
            why="a processor gets its threads",
        ),
        Hook(
            target=f"{processor}._get_text_prompt_input",
            signature=(
                "(self, prompt: str | list[dict], do_preprocess: bool, adapter_name: str, "
                "tools: list[object] | None = None, "
                "reasoning_effort: Optional[Literal['low', 'medium', 'high', 'max']] = None, "
                "chat_template_kwargs: dict | None = None, **kwargs)"
            ),
            replace=prompts.get_text_prompt_input,
            why="it holds the event loop of all streams for as long as a prompt is rendered and tokenized",
        ),
        Hook(
            target="lmdeploy.vl.engine:ImageEncoder.wrap_for_pytorch",
            signature=(
                "(self, messages: list[dict], chat_template, tokenizer, tools: list[object] | None = None, "
                "chat_template_kwargs: dict | None = None) -> list[dict]"
            ),
            replace=prompts.wrap_for_pytorch,
            why="it tokenizes a prompt with pictures on the event loop",
        ),
        Hook(
            target="lmdeploy.serve.openai.endpoints.auxiliary:register",
            signature="(router: 'APIRouter', server_context) -> 'None'",
            replace=token_routes.auxiliary_register,
            why="its endpoints tokenize on the event loop",
        ),
        Hook(
            target="lmdeploy.serve.anthropic.endpoints.messages_count_tokens:register",
            signature="(router: 'APIRouter', server_context, *, merge_inline_system: 'bool' = False) -> 'None'",
            replace=token_routes.count_tokens_register,
            why="its endpoint tokenizes on the event loop",
        ),
    ]
