"""Hooks in the engine process that keep a request from ending its loop."""

from engines.lmdeploy.hooks.names import ENGINE
from engines.lmdeploy.patching import Hook


def admission_hooks() -> list[Hook]:
    """In the engine process: no request may end the loop that serves all."""
    from engines.lmdeploy.http import admission

    return [
        Hook(
            target=f"{ENGINE}.get_engine_config",
            signature="(self)",
            replace=admission.get_engine_config,
            why="the api_server asks for it at start-up and must know the engine's limits",
        ),
        Hook(
            target=f"{ENGINE}._on_add_message",
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
