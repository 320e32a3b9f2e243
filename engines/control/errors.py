"""Why a control request of ``/kv/v1`` is not done: the request's fault, or the engine's.

Exception
 ├─ RefusedError            the client can mend the request                 400
 │  └─ StaleFenceError      a newer change came first                       409
 └─ EngineUnavailableError  the engine is gone, stuck or failed             503
"""


class RefusedError(ValueError):
    """A control request can't be carried out; the message names the fault and the allowed values."""


class StaleFenceError(RefusedError):
    """A change is older than one that came before it."""


class EngineUnavailableError(RuntimeError):
    """The engine did not answer in time, or failed to."""
