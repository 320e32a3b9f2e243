"""What is replaced so that a tenant's blocks stay its own."""

from engines.lmdeploy.hooks.names import MESSAGES, TRIE
from engines.lmdeploy.patching import Hook


def tenant_hooks() -> list[Hook]:
    """In both processes: the tenant's salt travels with a request and keeps its blocks apart."""
    from engines.lmdeploy.trie import tenancy

    return [
        Hook(
            target=f"{MESSAGES}:GenerationConfig.__post_init__",
            signature="(self)",
            replace=tenancy.CARRIED_SALT.generation_config_post_init,
            why="it is made where the request is handled, and is sent to the engine process",
        ),
        Hook(
            target="lmdeploy.pytorch.messages:SamplingParam.from_gen_config",
            signature=f"(cls, gen_config: {MESSAGES}.GenerationConfig)",
            replace=tenancy.CARRIED_SALT.sampling_param_from_gen_config,
            why="a sequence keeps it from the request",
        ),
        Hook(
            target="lmdeploy.pytorch.messages:SchedulerSequence.get_prefix_cache_extra_identity",
            signature="(self, start: int, end: int) -> tuple[lmdeploy.pytorch.prefix_cache_state.MultimodalSpan, ...]",
            replace=tenancy.block_extra_identity,
            why="it is compared before a cached block is used",
        ),
        Hook(
            target=f"{TRIE}.checkpoint:make_request_multimodal_identity",
            signature="(seq: lmdeploy.pytorch.messages.SchedulerSequence, step: int)",
            replace=tenancy.request_extra_identity,
            why="it is compared before a cached state is used",
        ),
    ]
