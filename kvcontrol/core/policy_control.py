"""The bodies of ``/kv/v1/policy``: which policy of each kind an instance runs, and how it is told to run another."""

import msgspec

POLICY_PATH = "/kv/v1/policy"

PolicyParams = dict[str, str | int | float | bool | None]


class PolicyChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``PUT /kv/v1/policy``: from now on run ``name`` with ``params`` for decisions of this ``kind``."""

    kind: str
    name: str
    params: PolicyParams = {}


__all__ = ["POLICY_PATH", "PolicyChange", "PolicyParams"]
