"""The error for a model without instances: 404 if that is certain, 503 if it may be temporary."""

from gateway.errors import NoInstanceError, NotFoundError
from gateway.registry import Registry

_RETRY_AFTER_S = 2


def missing_model(registry: Registry, model: str) -> NotFoundError | NoInstanceError:
    """Return the error for a model that no usable instance serves."""
    if registry.models.may_serve(model):
        return NoInstanceError(
            f"no usable instance serves the model {model!r} now: an instance that served it is away, or an instance "
            "has not listed its models yet; try again later",
            param="model",
            retry_after_s=_RETRY_AFTER_S,
        )
    return NotFoundError(
        f"the model {model!r} does not exist; see /v1/models for those that do", param="model", code="model_not_found"
    )
