"""THE table of what kvgate replaces inside LMDeploy 0.18: every private symbol, its signature, and why.

A function per purpose returns its hooks; ``patching.install`` checks a table as a whole before it changes anything.
The replacements live beside their subject (``cpu/``, ``lifeline.py``, ``events.py``, …); this file holds names and
signatures only. Asking for a table imports torch, never LMDeploy: that is for ``install``, once torch is as LMDeploy
wants it.
"""

from engines.lmdeploy.cpu.resources import CpuResources
from engines.lmdeploy.patching import Hook

_AGENT = "lmdeploy.pytorch.engine.model_agent.agent"
_MODEL_INPUTS = "lmdeploy.pytorch.model_inputs.ModelInputs"
_CHECKPOINT_INPUTS = "lmdeploy.pytorch.engine.cache_inputs.CacheCheckpointInputs"
_ENGINE = "lmdeploy.pytorch.engine.engine:Engine"
_TRIE = "lmdeploy.pytorch.paging.block_trie"
_CACHE_ENGINE = "lmdeploy.pytorch.engine.cache_engine"
_CONFIG = "lmdeploy.pytorch.config"
_MESSAGES = "lmdeploy.messages"


def cpu_hooks(resources: CpuResources) -> list[Hook]:
    """What LMDeploy's PyTorch engine needs to run where CUDA is absent; installed after ``torch_hooks``."""
    return [*_configuration_hooks(), *_engine_hooks(resources)]


def torch_hooks(resources: CpuResources) -> list[Hook]:
    """What LMDeploy expects of torch; installed before LMDeploy is imported, whose decorators use some of it."""
    from engines.lmdeploy.cpu import compiler, device

    a_device = "(device: torch.device | str | int | None = None)"
    return [
        Hook(
            target="torch:compile",
            signature=None,  # its keywords change with each torch; the stand-in takes them all
            replace=compiler.uncompiled,
            why="it needs a C++ compiler and ten seconds at first use",
        ),
        Hook(
            target="torch.cuda:Stream",
            signature="(device=None, priority=0, **kwargs)",
            replace=device.stream_type,
            why="the agent makes three streams",
        ),
        Hook(
            target="torch.cuda:Event",
            signature="(enable_timing=False, blocking=False, interprocess=False, external=False)",
            replace=device.event_type,
            why="steps and transfers are ordered by events",
        ),
        Hook(
            target="torch.cuda:stream",
            signature="(stream: Optional[ForwardRef('torch.cuda.Stream')]) -> torch.cuda.StreamContext",
            replace=device.stream_context,
            why="the agent's loops run inside a stream",
        ),
        Hook(
            target="torch.cuda:current_stream",
            signature=f"{a_device} -> torch.cuda.streams.Stream",
            replace=device.the_stream,
            why="sampling and the cache engine ask for it",
        ),
        Hook(
            target="torch.cuda:default_stream",
            signature=f"{a_device} -> torch.cuda.streams.Stream",
            replace=device.the_stream,
            why="asked for beside current_stream",
        ),
        Hook(
            target="torch.cuda:synchronize",
            signature=f"{a_device} -> None",
            replace=device.nothing,
            why="sleep and weight updates wait for the device",
        ),
        Hook(
            target="torch.cuda:empty_cache",
            signature="() -> None",
            replace=device.nothing,
            why="called before memory is measured",
        ),
        Hook(
            target="torch.cuda:mem_get_info",
            signature="(device: 'Device' = None) -> tuple[int, int]",
            replace=device.mem_get_info(resources.kv_bytes),
            why="the KV pool is sized by free memory",
        ),
        Hook(
            target="torch.cuda:current_device",
            signature="() -> int",
            replace=device.current_device,
            why="tensors are made and moved there",
        ),
        Hook(
            target="torch.cuda:set_device",
            signature="(device: torch.device | str | int | None) -> None",
            replace=device.nothing,
            why="executors select a device",
        ),
    ]


def _configuration_hooks() -> list[Hook]:
    from engines.lmdeploy.cpu import gates

    return [
        Hook(
            target="lmdeploy.messages:PytorchEngineConfig.__post_init__",
            signature="(self)",
            replace=gates.engine_config,
            why="it asserts a device and a dtype that exclude cpu and float32",
        ),
        Hook(
            target="lmdeploy.cli.utils:ArgumentHelper.device",
            signature="(parser, default: str = 'cuda', choices: list[str] = ['cuda', 'ascend', 'maca', 'camb'])",
            replace=gates.device_argument,
            why="--device cpu",
        ),
        Hook(
            target="lmdeploy.cli.utils:ArgumentHelper.dtype",
            signature="(parser, default: str = 'auto')",
            replace=gates.dtype_argument,
            why="--dtype float32",
        ),
        Hook(
            target="lmdeploy.utils:is_bf16_supported",
            signature="(device_type: str = 'cuda')",
            replace=gates.bf16_supported,
            why="it asks for CUDA's compute capability",
        ),
        Hook(
            target="lmdeploy.utils:get_max_batch_size",
            signature="(device_type: str)",
            replace=gates.max_batch_size,
            why="it asserts a device other than cpu",
        ),
        Hook(
            target="lmdeploy.pytorch.check_env.torch:TorchChecker.__init__",
            signature="(self, device: str = 'cuda', logger=None) -> None",
            replace=gates.torch_checker,
            why="its trial tensor is made on cuda",
        ),
    ]


def _engine_hooks(resources: CpuResources) -> list[Hook]:
    from engines.lmdeploy.cpu import agent, cache, selection

    return [
        Hook(
            target="lmdeploy.pytorch.backends.selector:_get_backend",
            signature="() -> type[lmdeploy.pytorch.backends.base.OpsBackend]",
            replace=selection.select(resources.threads),
            why="the operators of the device cpu",
        ),
        Hook(
            target=f"{_CACHE_ENGINE}.engine:CacheEngine.allocate_gpu_cache",
            signature="(self)",
            replace=cache.allocate_gpu_cache,
            why="the KV pool is allocated on cuda",
        ),
        Hook(
            target=f"{_CACHE_ENGINE}.state:_allocate_state_caches",
            signature=(
                f"(tensor_specs: collections.abc.Sequence[{_CACHE_ENGINE}.schema.CacheTensorSpec], num_caches: int, "
                f"device: torch.device | str) -> {_CACHE_ENGINE}.layout.CacheAllocation"
            ),
            replace=cache.allocate_state_caches,
            why="the state pool is allocated on cuda",
        ),
        Hook(
            target=f"{_AGENT}:BaseModelAgent.__init__",
            signature=(
                f"(self, model_path: str, model_config: {_CONFIG}.ModelConfig, cache_config: {_CONFIG}.CacheConfig, "
                f"backend_config: {_CONFIG}.BackendConfig, misc_config: {_CONFIG}.MiscConfig, "
                "dist_ctx: lmdeploy.pytorch.distributed.DistContext, "
                "device_ctx: lmdeploy.pytorch.devices.device_manager.DeviceContext, adapters: dict[str, str] = None, "
                f"specdecode_config: {_CONFIG}.SpecDecodeConfig = None, trust_remote_code: bool = False)"
            ),
            replace=agent.agent_init,
            why="it names its device cuda",
        ),
        Hook(
            target=f"{_AGENT}:_try_to_cuda",
            signature="(val, non_blocking: bool = False)",
            replace=agent.host_to_device,
            why="inputs are copied to cuda",
        ),
        Hook(
            target=f"{_AGENT}:BatchedOutputs.to_cpu",
            signature="(self)",
            replace=agent.device_to_host,
            why="on a CPU it aliases tensors that the agent goes on updating",
        ),
        Hook(
            target=f"{_AGENT}:BaseModelAgent.warmup",
            signature="(self)",
            replace=agent.no_warmup,
            why="it captures graphs with inputs made on cuda",
        ),
        Hook(
            target=f"{_AGENT}:BaseModelAgent._async_model_forward",
            signature=(
                f"(self, inputs: {_MODEL_INPUTS}, return_logits: bool, "
                f"cache_inputs: {_CHECKPOINT_INPUTS} | None = None)"
            ),
            replace=agent.compute_on_own_thread(resources.threads),
            why="on a CPU it blocks the event loop of the scheduler",
        ),
    ]


def lifeline_hooks() -> list[Hook]:
    """An instance ends as a whole: the server when its engine process dies, the engine when the server does."""
    from engines.lmdeploy import lifeline

    engine = "lmdeploy.pytorch.engine.mp_engine.zmq_engine:ZMQMPEngine"
    return [
        Hook(
            target=f"{engine}._start_mp_proc",
            signature=(
                f"(self, model_path: str, engine_config: {_MESSAGES}.PytorchEngineConfig = None, "
                f"speculative_config: {_MESSAGES}.SpeculativeConfig = None, **kwargs)"
            ),
            replace=lifeline.watch_engine,
            why="the server goes on answering 503 for ever once its engine process is gone",
        ),
        Hook(
            target=f"{engine}._mp_proc",
            signature=(
                "(shared_dict: dict, condition: <bound method BaseContext.Condition of "
                "<multiprocessing.context.DefaultContext object>>, model_path: str, "
                f"engine_config: {_MESSAGES}.PytorchEngineConfig = None, log_level: str = 'WARNING', "
                f"speculative_config: {_MESSAGES}.SpeculativeConfig = None, **kwargs)"
            ),
            replace=lifeline.engine_process,
            why="it could die at start-up when its parent was quick",
        ),
        Hook(
            target=f"{engine}.close",
            signature="(self) -> None",
            replace=lifeline.closing,
            why="an engine process that ends after close() is no failure",
        ),
        Hook(
            target=f"{_ENGINE}.async_loop",
            signature="(self)",
            replace=lifeline.engine_loop,
            why="a process whose engine loop failed lives on and serves nothing",
        ),
    ]


def event_hooks() -> list[Hook]:
    """In the engine process: KV events from the block trie, and the agent that publishes them."""
    from engines.lmdeploy import agent, events

    return [
        Hook(
            target=f"{_TRIE}.trie:BlockTrie._get_or_create_root",
            signature="(self, adapter_name: str)",
            replace=events.trie_root,
            why="a node finds its tracker through its trie's root",
        ),
        Hook(
            target=f"{_TRIE}.node:Node.attach_to",
            signature="(self, parent: 'Node')",
            replace=events.node_attach_to,
            why="a block became reusable",
        ),
        Hook(
            target=f"{_TRIE}.node:Node.detach_leaf",
            signature="(self)",
            replace=events.node_detach_leaf,
            why="a block was evicted",
        ),
        Hook(
            target=f"{_ENGINE}.__init__",
            signature=(
                f"(self, model_path: str, engine_config: {_MESSAGES}.PytorchEngineConfig = None, "
                f"trust_remote_code: bool = False, speculative_config: {_MESSAGES}.SpeculativeConfig = None) -> None"
            ),
            replace=agent.engine_init,
            why="an engine gets its agent",
        ),
        Hook(
            target=f"{_ENGINE}._loop_finally",
            signature="(self)",
            replace=agent.engine_loop_finally,
            why="the agent goes with its engine",
        ),
        Hook(
            target=f"{_ENGINE}.sleep",
            signature="(self, level: int = 1)",
            replace=agent.engine_sleep,
            why="the trie outlives the pool that sleep frees, and would serve garbage",
        ),
        Hook(
            target=f"{_ENGINE}.update_params",
            signature="(self, request: Any)",
            replace=agent.engine_update_params,
            why="the trie outlives the weights that its blocks were computed with",
        ),
        Hook(
            target=f"{_ENGINE}.update_weights_from_ipc",
            signature="(self, request: Any, reject_reason: str | None = None)",
            replace=agent.engine_update_weights,
            why="likewise",
        ),
        Hook(
            target=f"{_ENGINE}.update_weights_from_distributed",
            signature="(self, request: Any)",
            replace=agent.engine_update_weights,
            why="likewise",
        ),
    ]


def tenant_hooks() -> list[Hook]:
    """In both processes: the tenant's salt travels with a request and keeps its blocks apart."""
    from engines.lmdeploy import tenancy

    return [
        Hook(
            target=f"{_MESSAGES}:GenerationConfig.__post_init__",
            signature="(self)",
            replace=tenancy.generation_config_post_init,
            why="it is made where the request is handled, and is sent to the engine process",
        ),
        Hook(
            target="lmdeploy.pytorch.messages:SamplingParam.from_gen_config",
            signature=f"(cls, gen_config: {_MESSAGES}.GenerationConfig)",
            replace=tenancy.sampling_param_from_gen_config,
            why="it is what a sequence keeps of the request",
        ),
        Hook(
            target="lmdeploy.pytorch.messages:SchedulerSequence.get_prefix_cache_extra_identity",
            signature="(self, start: int, end: int) -> tuple[lmdeploy.pytorch.prefix_cache_state.MultimodalSpan, ...]",
            replace=tenancy.block_extra_identity,
            why="it is compared before a cached block is used",
        ),
        Hook(
            target=f"{_TRIE}.checkpoint:make_request_multimodal_identity",
            signature="(seq: lmdeploy.pytorch.messages.SchedulerSequence, step: int)",
            replace=tenancy.request_extra_identity,
            why="it is compared before a cached state is used",
        ),
    ]


def admission_hooks() -> list[Hook]:
    """In the engine process: no request may end the loop that serves all."""
    from engines.lmdeploy import admission

    return [
        Hook(
            target=f"{_ENGINE}.get_engine_config",
            signature="(self)",
            replace=admission.get_engine_config,
            why="the api_server asks for it at start-up and must know the engine's limits",
        ),
        Hook(
            target=f"{_ENGINE}._on_add_message",
            signature="(self, reqs: list[lmdeploy.pytorch.engine.request.Request], **kwargs)",
            replace=admission.on_add_message,
            why="a bad request raised in the engine's loop, or in its next step, and ended it",
        ),
        Hook(
            target="lmdeploy.pytorch.engine.logits_process:_filter_repetition_ngram_",
            signature=(
                "(scores: torch.Tensor, stop_words: torch.Tensor, generated_ids: torch.Tensor, "
                "n: torch.Tensor | None, threshold: torch.Tensor, max_n: int, max_ngram_window_size: int)"
            ),
            replace=admission.filter_repetition_ngram,
            why="a request with ignore_eos beside one that stops at repetitions ended the loop",
        ),
    ]


def server_hooks() -> list[Hook]:
    """In the api_server's process alone: ``/kv/v1``, our series, the salt's header, and what it refuses."""
    from engines.lmdeploy import admin, admission

    serve = "lmdeploy.serve"
    return [
        Hook(
            target=f"{serve}.core.async_engine:AsyncEngine.preprocess",
            signature=(
                f"(self, messages, session_id: int | {serve}.managers.session_manager.Session, "
                f"gen_config: {_MESSAGES}.GenerationConfig | None = None, tools: list[object] | None = None, "
                "reasoning_effort: Optional[Literal['low', 'medium', 'high', 'max']] = None, "
                "do_preprocess: bool = True, adapter_name: str | None = None, input_ids: list | None = None, "
                "enable_thinking: bool | None = None, chat_template_kwargs: dict | None = None, "
                "media_io_kwargs: dict[str, typing.Any] | None = None, "
                "mm_processor_kwargs: dict[str, typing.Any] | None = None, **kwargs) "
                f"-> {serve}.core.async_engine.PreprocessedRequest"
            ),
            replace=admission.preprocess,
            why="every endpoint's request passes there with its tokens and final sampling",
        ),
        Hook(
            target=f"{_MESSAGES}:GenerationConfig.__post_init__",
            signature="(self)",
            replace=admission.generation_config_post_init,
            why="its assertions about a client's values became 500",
        ),
        Hook(
            target=f"{serve}.utils.server_utils:validate_json_request",
            signature="(raw_request: starlette.requests.Request)",
            replace=admission.validate_json_request,
            why="fields of LMDeploy's own proxies are read from the raw body, whoever sends it",
        ),
        Hook(
            target=f"{serve}.openai.chat_completions.logits_processors:logit_bias_logits_processor",
            signature=(
                "(logit_bias: 'dict[int, float] | dict[str, float]', tokenizer: 'PreTrainedTokenizerBase') "
                "-> 'LogitsProcessor'"
            ),
            replace=admission.logit_bias_logits_processor,
            why="it returns a local function, which can't be pickled to the engine process",
        ),
        Hook(
            target="lmdeploy.serve.core.async_engine:AsyncEngine.__init__",
            signature=(
                "(self, model_path: str, model_name: str | None = None, "
                "backend: Literal['turbomind', 'pytorch'] = 'turbomind', "
                f"backend_config: {_MESSAGES}.TurbomindEngineConfig | {_MESSAGES}.PytorchEngineConfig | None = None, "
                "chat_template_config: lmdeploy.model.ChatTemplateConfig | None = None, "
                "max_log_len: int | None = None, "
                f"trust_remote_code: bool = False, speculative_config: {_MESSAGES}.SpeculativeConfig | None = None, "
                "allowed_media_domains: list[str] | None = None, **kwargs) -> None"
            ),
            replace=admin.async_engine_init,
            why="it knows the served name before the engine process starts",
        ),
        Hook(
            target="lmdeploy.serve.openai.api_server:mount_metrics",
            signature="(app: 'FastAPI', backend_config: 'PytorchEngineConfig | TurbomindEngineConfig')",
            replace=admin.mount_metrics,
            why="it is given the app before it serves",
        ),
    ]


def all_hooks(resources: CpuResources) -> list[Hook]:
    """Every hook of every table, for the contract tests."""
    return [
        *torch_hooks(resources),
        *cpu_hooks(resources),
        *lifeline_hooks(),
        *event_hooks(),
        *tenant_hooks(),
        *admission_hooks(),
        *server_hooks(),
    ]


__all__ = [
    "admission_hooks",
    "all_hooks",
    "cpu_hooks",
    "event_hooks",
    "lifeline_hooks",
    "server_hooks",
    "tenant_hooks",
    "torch_hooks",
]
