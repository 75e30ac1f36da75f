"""Rotation of tenants: a tenant without a batch slot runs in turn with the others."""

from collections.abc import Iterable

from moonpool.engine.decode.core.request import DecodeRequest
from moonpool.engine.decode.core.tenant_shares import may_leave


class TenantRotation:
    """Counts each tenant's steps, divided by the tenant's weight, while a tenant waits without a batch slot.

    Shares alone would starve such a tenant: with more tenants than slots, or a group that needs more than the tenant's
    share, no other tenant is above its share.
    """

    def __init__(self) -> None:
        self._steps: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._steps)

    def steps_of(self, request: DecodeRequest) -> float:
        """Return the steps of a request's tenant; 0 while no tenant is without a slot."""
        return self._steps.get(request.spec.tenant, 0.0)

    def note(self, placed: Iterable[DecodeRequest], waiting: list[DecodeRequest]) -> None:
        """Begin to count when a tenant of `waiting` has no slot, and end when no tenant lacks one."""
        if not waiting:
            self._steps = {}
            return
        with_slots = [request.spec.tenant for request in placed]
        wanting = [request.spec.tenant for request in waiting]
        # A newcomer begins at the least count: it is next, and does not get the steps of the time before.
        least = min(self._steps.values(), default=0.0)
        contend = dict.fromkeys([*with_slots, *wanting]) if not set(wanting) <= set(with_slots) else {}
        self._steps = {tenant: self._steps.get(tenant, least) for tenant in contend}

    def advance(self, steps: int, running: list[DecodeRequest]) -> None:
        """Count steps of the running requests' tenants."""
        if self._steps:
            weights = {request.spec.tenant: request.spec.weight for request in running}
            self._steps |= {tenant: self._steps.get(tenant, 0.0) + steps / weights[tenant] for tenant in weights}

    def leaving(self, running: list[DecodeRequest], request: DecodeRequest, lacking: int) -> list[DecodeRequest]:
        """Return the requests that leave the batch because another tenant, without a slot, is next.

        Args:
            running: requests in the batch, in the order in which they joined.
            request: wants the slots. Tenants with fewer steps than its tenant stay.
            lacking: slots to be freed.

        Returns:
            The requests; none if nobody takes part in the rotation, or if they would free too few slots.
        """
        if request.spec.tenant not in self._steps:
            return []
        own, chosen = self._steps[request.spec.tenant], list[DecodeRequest]()
        queues = may_leave(running, request)
        queues = {tenant: queue for tenant, queue in queues.items() if self._steps.get(tenant, -1.0) >= own}
        while lacking > 0 and queues:
            tenant = max(queues, key=lambda tenant: self._steps[tenant])
            victim = queues[tenant].pop()
            chosen.append(victim)
            lacking -= len(victim.sequences)
            if not queues[tenant]:
                del queues[tenant]
        return chosen if lacking <= 0 else []

    def digest(self) -> list[tuple[str, float]]:
        """Return a hash input: the steps."""
        return list(self._steps.items())
