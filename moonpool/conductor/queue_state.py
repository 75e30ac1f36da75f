"""Wait queues and tenants, for `ClusterState`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from moonpool.conductor.core.scheduler import RequestScheduler
from moonpool.v1 import conductor_pb2

MAX_LISTED_TENANTS = 100
"""Tenants that are listed."""


def queue_state(
    requests: RequestScheduler, tenants: Counter[str], weight_of: Callable[[str], float]
) -> conductor_pb2.QueueState:
    """Return the lengths of the wait queues, and requests by tenant.

    Args:
        requests: the core's requests.
        tenants: number of open requests, by tenant.
        weight_of: a tenant's weight in fair sharing.
    """
    waiting = Counter(requests.memory_queue.count()) + Counter(requests.slo_queue.count())
    listed = sorted(tenants)[:MAX_LISTED_TENANTS]
    return conductor_pb2.QueueState(
        for_limits=len(requests.slo_queue),
        for_room=len(requests.memory_queue),
        prompt_bytes=requests.slo_queue.nbytes,
        tenants=[
            conductor_pb2.TenantState(
                tenant=tenant, weight=weight_of(tenant), requests=tenants[tenant], waiting=waiting[tenant]
            )
            for tenant in listed
        ],
    )
