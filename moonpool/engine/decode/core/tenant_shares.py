"""Tenants' shares in one decode instance, where requests from all conductors meet.

Each request carries the tenant's weight. A tenant's use divided by the tenant's weight says how much of the share the
tenant has. The tenant with most use per weight gives up slots, blocks and step time first; the tenant with least use
per weight gets them first. With one tenant, all requests go by order.
"""

from collections.abc import Callable, Iterable

from moonpool.base.frozen import frozen
from moonpool.engine.decode.core.request import DecodeRequest

_ROUNDING = 1e-9
"""Relative rounding error in a sum over requests: weight 3 beside weight 1 has exactly 48 out of 64 slots."""


@frozen
class TenantUse:
    """Tenants' use of one resource.

    Attributes:
        taken: each tenant's use divided by the tenant's weight.
        level: use divided by weight, the same for each tenant, if tenants shared the whole resource by weights.
    """

    taken: dict[str, float]
    level: float = 0.0

    def of(self, request: DecodeRequest) -> float:
        """Return the use of the request's tenant, divided by the tenant's weight."""
        return self.taken.get(request.spec.tenant, 0.0)

    def order(self, request: DecodeRequest) -> tuple[float, tuple[float, int]]:
        """Sort key over all tenants' requests: the lowest is served first, the highest gives up first."""
        return self.of(request), request.order_key


def tenant_use(
    taking: Iterable[DecodeRequest],
    amount: Callable[[DecodeRequest], float],
    *,
    total: float = 0.0,
    others: Iterable[DecodeRequest] = (),
) -> TenantUse:
    """Compute what the requests' tenants take.

    Args:
        taking: requests that take something.
        amount: what a request takes.
        total: size of the resource.
        others: requests that take none of the resource; their tenants have a share, too.
    """
    taken: dict[str, float] = {}
    weights: dict[str, float] = {}
    for request in taking:
        spec = request.spec
        weights[spec.tenant] = spec.weight
        taken[spec.tenant] = taken.get(spec.tenant, 0.0) + amount(request) / spec.weight
    weights |= {request.spec.tenant: request.spec.weight for request in others}
    return TenantUse(taken, total / sum(weights.values()) if weights else 0.0)


def block_use(requests: Iterable[DecodeRequest], total: int = 0) -> TenantUse:
    """Return blocks out of `total` that tenants have or were promised."""
    return tenant_use(requests, lambda request: len(request.blocks) + request.promised, total=total)


def several_tenants(requests: Iterable[DecodeRequest]) -> bool:
    """Return whether the requests have more than one tenant."""
    tenants = iter(requests)
    first = next(tenants, None)
    return first is not None and any(request.spec.tenant != first.spec.tenant for request in tenants)


def by_tenant(requests: Iterable[DecodeRequest]) -> dict[str, list[DecodeRequest]]:
    """Return requests by tenant, each in the order given."""
    found: dict[str, list[DecodeRequest]] = {}
    for request in requests:
        found.setdefault(request.spec.tenant, []).append(request)
    return found


def leave_for_share(
    running: list[DecodeRequest], request: DecodeRequest, lacking: int, use: TenantUse
) -> list[DecodeRequest]:
    """Return requests that leave the batch so that `request` gets batch slots within the tenant's share.

    No tenant falls below the tenant's share. The tenant with most slots per weight gives up a request first, the last
    in order. A promised time between tokens is kept, so a request with a promise stays.

    Args:
        running: requests in the batch.
        request: wants the slots.
        lacking: slots to be freed.
        use: the tenants' slots.

    Returns:
        The requests; none if they would free too few slots.
    """
    if use.of(request) + _slots_by_weight(request) > use.level * (1 + _ROUNDING):
        return []
    taken, queues, chosen = dict(use.taken), may_leave(running, request), list[DecodeRequest]()
    while lacking > 0 and queues:
        tenant = max(queues, key=lambda tenant: taken[tenant])
        victim = queues[tenant].pop()
        taken[tenant] -= _slots_by_weight(victim)
        if taken[tenant] < use.level * (1 - _ROUNDING):
            return []
        chosen.append(victim)
        lacking -= len(victim.sequences)
        if not queues[tenant]:
            del queues[tenant]
    return chosen if lacking <= 0 else []


def _slots_by_weight(request: DecodeRequest) -> float:
    return len(request.sequences) / request.spec.weight


def may_leave(running: list[DecodeRequest], request: DecodeRequest) -> dict[str, list[DecodeRequest]]:
    """Other tenants' requests without a promise, by tenant and in order."""
    tenant = request.spec.tenant
    queues = by_tenant(other for other in running if other.spec.tenant != tenant and not other.tbt_slo_s)
    for queue in queues.values():
        queue.sort(key=lambda other: other.order_key)
    return queues
