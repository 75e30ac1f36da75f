"""Eviction policies of the DRAM tier by name. A new one is a class like `EvictionPolicy`, and an entry here."""

from collections.abc import Callable, Mapping

from services.kvstore.policies.base import EvictionPolicy
from services.kvstore.policies.kv_aware import KVAware
from services.kvstore.policies.queues import LFU, LRU, S3FIFO, LengthAware

POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "length-aware": LengthAware,
    "s3-fifo": S3FIFO,
    "kv-aware": KVAware,
}
