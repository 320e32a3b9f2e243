"""Which blocks go, which move, and when: decisions from what is known, never a touch of memory."""

from kvcontrol.kv_policy.eviction import EvictionDecision, EvictionPolicy, PolicyContext
from kvcontrol.kv_policy.lru import LruPolicy
from kvcontrol.kv_policy.naive import NaiveLruPolicy

__all__ = ["EvictionDecision", "EvictionPolicy", "LruPolicy", "NaiveLruPolicy", "PolicyContext"]
