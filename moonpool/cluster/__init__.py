"""How an instance belongs to a cluster: its log of KV events and its Join stream to the conductor. Torch-free."""

from moonpool.cluster.join import ChangeBell, ClusterMembership, InstanceReport, JoinAgent, Notify
from moonpool.cluster.kv_events import HeldKeys, KVEventLog

__all__ = ["ChangeBell", "ClusterMembership", "HeldKeys", "InstanceReport", "JoinAgent", "KVEventLog", "Notify"]
