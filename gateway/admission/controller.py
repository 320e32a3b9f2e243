"""Whether a request enters at all. Thin for now: its model must be known, and an instance must be usable for it."""

from gateway.errors import NoInstanceError, NotFoundError
from gateway.registry import Instance, Registry

_RETRY_AFTER_S = 2


class AdmissionController:
    """Decides from the registry's present state."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def admit(self, model: str) -> tuple[Instance, ...]:
        """Return the instances that may take a request for ``model``.

        Raises ``NotFoundError`` for a model that no instance ever listed, ``NoInstanceError`` when those that serve it
        are away (or none has come up yet, so that nobody knows what is served).
        """
        instances = self.usable(model)
        if instances:
            return instances
        everyone = self._registry.all()
        if self._registry.knows_model(model) or not any(each.models for each in everyone):
            raise NoInstanceError(
                f"none of the {len(everyone)} instances is usable for model {model!r} now", retry_after_s=_RETRY_AFTER_S
            )
        raise NotFoundError(
            f"the model {model!r} does not exist; see /v1/models for those that do",
            param="model",
            code="model_not_found",
        )

    def usable(self, model: str) -> tuple[Instance, ...]:
        """Return the instances that serve ``model`` and are usable at this moment."""
        return self._registry.usable(model)


__all__ = ["AdmissionController"]
