"""Hooks that keep attention at the memory's speed on CUDA."""

from engines.lmdeploy.patching import Hook

_CUDA = "lmdeploy.pytorch.backends.cuda"


def attention_hooks() -> list[Hook]:
    """In the engine process, on CUDA: which kernels compute attention, and for which models prompts have graphs."""
    from engines.lmdeploy import graphs
    from engines.lmdeploy.attention import flash3, paged, piecewise

    configs = ("model_config", "ModelConfig"), ("cache_config", "CacheConfig"), ("backend_config", "BackendConfig")
    return [
        Hook(
            target=f"{_CUDA}.attention:_build_paged_attention",
            signature=(
                "(spec: lmdeploy.pytorch.backends.attention.PagedAttentionBuildSpec) "
                f"-> {_CUDA}.attention.default.TritonAttentionImpl"
            ),
            replace=paged.build_paged_attention,
            why="its decode kernel splits long and short contexts alike: unequal ones take twice as long",
        ),
        Hook(
            target=f"{_CUDA}.attention:require_fa3_for_speculative_decoding",
            signature="() -> None",
            replace=flash3.require_for_speculation,
            why="it takes any FlashAttention-3 for one that reads pages",
        ),
        Hook(
            target=f"{_CUDA}.graph_runner.runner:_make_piecewise_graph_manager",
            signature=(
                f"(model: 'torch.nn.Module', {', '.join(f'{name}: {kind!r}' for name, kind in configs)}) "
                "-> 'PiecewiseGraphManager | None'"
            ),
            replace=piecewise.make_piecewise_graph_manager,
            why="Qwen2 and Llama have the conventional forward and lack the mark; an engine dies of a failed capture",
        ),
        Hook(
            target=f"{_CUDA}.graph_runner.runner:CUDAGraphRunner._capture_full_graph",
            signature="(self, graph_key: 'tuple', kwargs: 'dict[str, Any]')",
            replace=graphs.capture_full_graph,
            why="an engine dies of a decode graph that can't be captured",
        ),
    ]
