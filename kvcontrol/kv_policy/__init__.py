"""Which blocks go, which move, and when: decisions from what is known, never a touch of memory."""

from kvcontrol.kv_policy.arc import ArcPolicy
from kvcontrol.kv_policy.block_key import BlockKey
from kvcontrol.kv_policy.cost_aware import CostAwarePolicy
from kvcontrol.kv_policy.eviction import ContentKey, EvictionDecision, EvictionPolicy, PolicyContext
from kvcontrol.kv_policy.fairness import jain_index
from kvcontrol.kv_policy.fifo import FifoPolicy
from kvcontrol.kv_policy.lfu import LfuPolicy
from kvcontrol.kv_policy.lru import LruPolicy
from kvcontrol.kv_policy.lru2 import Lru2Policy
from kvcontrol.kv_policy.mq import MqPolicy
from kvcontrol.kv_policy.naive import NaiveLruPolicy
from kvcontrol.kv_policy.predictive import PredictivePolicy
from kvcontrol.kv_policy.qos import QosPolicy
from kvcontrol.kv_policy.registry import POLICIES, Parameter, PolicyError, PolicyKind, make_policy
from kvcontrol.kv_policy.s3fifo import S3FifoPolicy
from kvcontrol.kv_policy.tails_first import TailsFirst

__all__ = [
    "POLICIES",
    "ArcPolicy",
    "BlockKey",
    "ContentKey",
    "CostAwarePolicy",
    "EvictionDecision",
    "EvictionPolicy",
    "FifoPolicy",
    "LfuPolicy",
    "Lru2Policy",
    "LruPolicy",
    "MqPolicy",
    "NaiveLruPolicy",
    "Parameter",
    "PolicyContext",
    "PolicyError",
    "PolicyKind",
    "PredictivePolicy",
    "QosPolicy",
    "S3FifoPolicy",
    "TailsFirst",
    "jain_index",
    "make_policy",
]
