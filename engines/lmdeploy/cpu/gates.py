"""LMDeploy's configuration gates: the device ``cpu`` and the dtype ``float32`` are let through.

``auto`` becomes float32: without AVX-512 or AMX a half-precision GEMM is eight times slower than a float32 one, and
LMDeploy's own ``auto`` would turn a float32 checkpoint into float16.
"""

from functools import wraps
from typing import Any

DTYPES = ("auto", "float32", "float16", "bfloat16")
MAX_BATCH_SIZE = 64


def engine_config(original: Any) -> Any:
    """Wrap ``PytorchEngineConfig.__post_init__``.

    LMDeploy's own checks run as for ``cuda``, the one device for which they let every KV precision through.
    """

    @wraps(original)
    def post_init(self: Any) -> None:
        if self.device_type != "cpu":
            original(self)
            return
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, allowed on a CPU are {', '.join(DTYPES)}")
        dtype = "float32" if self.dtype == "auto" else self.dtype
        self.device_type, self.dtype = "cuda", "auto"
        try:
            original(self)
        finally:
            self.device_type, self.dtype = "cpu", dtype
        self.eager_mode = True

    return post_init


def bf16_supported(original: Any) -> Any:
    """Wrap ``is_bf16_supported``: a CPU computes in bfloat16 correctly, if slowly."""

    @wraps(original)
    def supported(device_type: str = "cuda") -> bool:
        return True if device_type in {"cpu", "auto"} else original(device_type)

    return supported


def max_batch_size(original: Any) -> Any:
    """Wrap ``get_max_batch_size``, which knows no ``cpu``."""

    @wraps(original)
    def size(device_type: str) -> int:
        return MAX_BATCH_SIZE if device_type == "cpu" else original(device_type)

    return size


def device_argument(original: Any) -> Any:
    """Wrap the command line's ``--device``: ``cpu`` is a choice, and the default."""
    function = original.__func__

    @wraps(function)
    def device(parser: Any, default: str = "cpu", choices: tuple[str, ...] | list[str] = ()) -> Any:
        del default
        return function(parser, "cpu", ["cpu", *choices])

    return staticmethod(device)


def dtype_argument(original: Any) -> Any:
    """Wrap the command line's ``--dtype``: ``float32`` is a choice."""
    function = original.__func__

    @wraps(function)
    def dtype(parser: Any, default: str = "auto") -> Any:
        action = function(parser, default)
        action.choices = [*action.choices, "float32"]
        action.help = 'data type of weights and activations; "auto" is float32 on a CPU'
        return action

    return staticmethod(dtype)


def torch_checker(original: Any) -> Any:
    """Wrap ``TorchChecker.__init__``: the tensor that it tries out is made on the CPU."""

    @wraps(original)
    def init(self: Any, device: str = "cuda", logger: Any = None) -> None:
        del device
        original(self, "cpu", logger)

    return init
