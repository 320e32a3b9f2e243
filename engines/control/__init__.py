"""The operator's control of any engine over ``/kv/v1``: policies, pins, quotas, shadow policies, and their metrics."""

__all__: list[str] = []
