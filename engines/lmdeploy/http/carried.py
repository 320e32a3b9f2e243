"""What LMDeploy carries of a request's headers to its sequence, where the scheduler finds it.

    headers -> middleware -> ContextVar -> GenerationConfig -> (pickled to the engine process) -> SamplingParam

LMDeploy has no field for it on that way, so it is an attribute of the two objects that go all of it.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from engines.requests.headers import HeaderValue

_Value = TypeVar("_Value")


class Carried(Generic[_Value]):
    """One value of a request's headers; ``attribute`` is its name on LMDeploy's objects."""

    def __init__(self, attribute: str, header: HeaderValue[_Value]) -> None:
        self.header = header
        self._attribute = attribute

    def of(self, carrier: Any) -> _Value:
        """Return what a ``GenerationConfig`` or ``SamplingParam`` carries."""
        return cast("_Value", getattr(carrier, self._attribute, self.header.absent))

    def carry(self, carrier: Any, value: _Value) -> None:
        """Put it on a ``GenerationConfig`` or ``SamplingParam``; nothing for its absence."""
        if value != self.header.absent:
            setattr(carrier, self._attribute, value)

    # What takes the place of LMDeploy's symbols (the tables are in hooks/).

    def generation_config_post_init(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """``GenerationConfig.__post_init__``, in the api_server: it is made while the request is being handled."""
        carried = self

        def __post_init__(self: Any) -> None:  # noqa: N807  # it is called by this name
            original(self)
            carried.carry(self, carried.header.current)

        return __post_init__

    def sampling_param_from_gen_config(self, original: Any) -> Any:
        """``SamplingParam.from_gen_config``, in the engine process: carry it on."""
        function = original.__func__
        carried = self

        def from_gen_config(cls: Any, gen_config: Any) -> Any:
            param = function(cls, gen_config)
            carried.carry(param, carried.of(gen_config))
            return param

        return classmethod(from_gen_config)
