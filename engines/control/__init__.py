"""What operators control in any engine by ``/kv/v1``: policies, pins, quotas, shadows, and their metric families."""

__all__: list[str] = []
