"""An instance's membership in a cluster: the KV event log, and the Join stream to a conductor. Without torch."""

from moonpool.base.cluster.join import ChangeBell, ClusterMembership, InstanceReport, JoinAgent, Notify
from moonpool.base.cluster.kv_events import HeldKeys, KVEventLog

__all__ = ["ChangeBell", "ClusterMembership", "HeldKeys", "InstanceReport", "JoinAgent", "KVEventLog", "Notify"]
