"""The built-in placement policies: a page each, with the source of the rule."""

from collections.abc import Mapping

from moonpool.conductor.placement.base import PlacementPolicy
from moonpool.conductor.placement.policies.baselines import LoadBalance, Random, RoundRobin
from moonpool.conductor.placement.policies.dynamo import DynamoCost
from moonpool.conductor.placement.policies.llm_d import LlmdScorers, LlmdSticky
from moonpool.conductor.placement.policies.lmetric import LMetric
from moonpool.conductor.placement.policies.mooncake import CacheAware, KVCacheCentric
from moonpool.conductor.placement.policies.preble import Preble
from moonpool.conductor.placement.policies.session_affinity import SessionAffinity
from moonpool.conductor.placement.policies.sglang import SglangRouter
from moonpool.conductor.placement.policies.social import Social
from moonpool.conductor.placement.policies.vllm import VllmRouter

DEFAULT_POLICY = "social"
POLICIES: Mapping[str, PlacementPolicy] = {
    "random": Random(),
    "round_robin": RoundRobin(),
    "load_balance": LoadBalance(),
    "shortest_queue": LoadBalance(stores=True),
    "cache_aware": CacheAware(),
    "sglang": SglangRouter(),
    "vllm": VllmRouter(),
    "llm_d": LlmdScorers(),
    "llm_d_sticky": LlmdSticky(),
    "dynamo": DynamoCost(),
    "preble": Preble(),
    "lmetric": LMetric(),
    "session_affinity": SessionAffinity(),
    "kvcache_centric": KVCacheCentric(),
    DEFAULT_POLICY: Social(),
}
"""By name, the simplest first."""
