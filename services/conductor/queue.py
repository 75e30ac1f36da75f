"""Who waits at the conductor, as the contract tells it."""

from collections import Counter
from collections.abc import Callable

from moonpool.v1 import conductor_pb2
from services.conductor.core.request import Requests

MAX_TENANTS = 100
"""Tenants that are told of."""


def queue_state(
    requests: Requests, tenants: Counter[str], weight_of: Callable[[str], float]
) -> conductor_pb2.QueueState:
    """The state of the queues.

    Args:
        requests: that the core serves.
        tenants: of all requests that have not ended, with their number.
        weight_of: a tenant's share.
    """
    waiting = Counter(requests.rooms.count()) + Counter(requests.line.count())
    told = sorted(tenants)[:MAX_TENANTS]
    return conductor_pb2.QueueState(
        for_limits=len(requests.line),
        for_room=len(requests.rooms),
        prompt_bytes=requests.line.nbytes,
        tenants=[
            conductor_pb2.TenantState(
                tenant=tenant, weight=weight_of(tenant), requests=tenants[tenant], waiting=waiting[tenant]
            )
            for tenant in told
        ],
    )
