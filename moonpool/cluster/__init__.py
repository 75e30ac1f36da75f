"""How an instance belongs to a cluster: its log of KV events and its Join stream to the conductor. Torch-free."""

from moonpool.cluster.events import EventLog, HeldKeys
from moonpool.cluster.join import JoinAgent, Notify
from moonpool.cluster.joining import Bell, Joining

__all__ = ["Bell", "EventLog", "HeldKeys", "JoinAgent", "Joining", "Notify"]
