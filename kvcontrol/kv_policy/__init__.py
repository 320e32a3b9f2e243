"""Which blocks go, which move, and when: decisions from what is known, never a touch of memory."""

from kvcontrol.kv_policy.adaptive import AdaptivePolicy
from kvcontrol.kv_policy.allowed import PolicyError
from kvcontrol.kv_policy.arc import ArcPolicy
from kvcontrol.kv_policy.block_key import BlockKey
from kvcontrol.kv_policy.cost_aware import CostAwarePolicy
from kvcontrol.kv_policy.cost_benefit import CostBenefitModel, Estimate, Migration, Prices, Quantity
from kvcontrol.kv_policy.eviction import ContentKey, EvictionDecision, EvictionPolicy, PolicyContext
from kvcontrol.kv_policy.hotspot import HotspotLineage
from kvcontrol.kv_policy.lru import LruPolicy
from kvcontrol.kv_policy.lru2 import Lru2Policy
from kvcontrol.kv_policy.migration import MigrationDecision, MigrationMode, MigrationPolicy
from kvcontrol.kv_policy.mq import MqPolicy
from kvcontrol.kv_policy.prediction_error import PredictionError
from kvcontrol.kv_policy.predictive import PredictivePolicy
from kvcontrol.kv_policy.prefill_speed import SHORT_PREFILL_TOKENS, PrefillSpeed
from kvcontrol.kv_policy.qos import QosPolicy
from kvcontrol.kv_policy.registry import DEFAULT_POLICY, POLICIES, make_policy
from kvcontrol.kv_policy.s3fifo import S3FifoPolicy
from kvcontrol.kv_policy.shadow import ShadowPolicies
from kvcontrol.kv_policy.spec import PolicySpec, parse_spec, parse_specs
from kvcontrol.kv_policy.tails_first import TailsFirst

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "SHORT_PREFILL_TOKENS",
    "AdaptivePolicy",
    "ArcPolicy",
    "BlockKey",
    "ContentKey",
    "CostAwarePolicy",
    "CostBenefitModel",
    "Estimate",
    "EvictionDecision",
    "EvictionPolicy",
    "HotspotLineage",
    "Lru2Policy",
    "LruPolicy",
    "Migration",
    "MigrationDecision",
    "MigrationMode",
    "MigrationPolicy",
    "MqPolicy",
    "PolicyContext",
    "PolicyError",
    "PolicySpec",
    "PredictionError",
    "PredictivePolicy",
    "PrefillSpeed",
    "Prices",
    "QosPolicy",
    "Quantity",
    "S3FifoPolicy",
    "ShadowPolicies",
    "TailsFirst",
    "make_policy",
    "parse_spec",
    "parse_specs",
]
