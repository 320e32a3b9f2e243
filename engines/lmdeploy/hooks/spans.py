"""What is replaced in the api_server's process where traces are made."""

from engines.lmdeploy.patching import Hook


def span_hooks() -> list[Hook]:
    """The times that the engine process says with its tokens."""
    from engines.lmdeploy.http import spans

    return [
        Hook(
            target="lmdeploy.metrics.metrics_processor:metrics_processor.queue_update",
            signature="(update_data: tuple)",
            replace=spans.queue_update,
            why="LMDeploy sums up a request's times for its series, and says nowhere which request they were of",
        ),
    ]
