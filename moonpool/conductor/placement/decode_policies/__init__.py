"""The built-in policies for decode: a page each, with the source of the rule."""

from collections.abc import Mapping

from moonpool.conductor.placement.base import DecodePolicy
from moonpool.conductor.placement.decode_policies.fewest_sequences import FewestSequences
from moonpool.conductor.placement.decode_policies.least_time import LeastTime
from moonpool.conductor.placement.decode_policies.most_memory import MostMemory
from moonpool.conductor.placement.decode_policies.social_decode import SocialDecode

DEFAULT_DECODE_POLICY = "least_time"
DECODE_POLICIES: Mapping[str, DecodePolicy] = {
    "fewest_sequences": FewestSequences(),
    "most_memory": MostMemory(),
    "social": SocialDecode(),
    DEFAULT_DECODE_POLICY: LeastTime(),
}
"""By name, the simplest first."""
