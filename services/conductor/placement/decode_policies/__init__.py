"""The built-in policies for decode: a page each, with the source of the rule."""

from collections.abc import Mapping

from services.conductor.placement.base import DecodePolicy
from services.conductor.placement.decode_policies.fewest_sequences import FewestSequences
from services.conductor.placement.decode_policies.least_time import LeastTime
from services.conductor.placement.decode_policies.most_memory import MostMemory
from services.conductor.placement.decode_policies.social_decode import SocialDecode

DEFAULT_DECODE_POLICY = "least_time"
DECODE_POLICIES: Mapping[str, DecodePolicy] = {
    "fewest_sequences": FewestSequences(),
    "most_memory": MostMemory(),
    "social": SocialDecode(),
    DEFAULT_DECODE_POLICY: LeastTime(),
}
"""By name, the simplest first."""
