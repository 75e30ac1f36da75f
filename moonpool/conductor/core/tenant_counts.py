"""Requests by tenant, and which tenant has more than a fair share."""

from collections import OrderedDict
from collections.abc import Mapping

from moonpool.base.scheduling.fair_share import QueueKey
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.conductor.core.tenant_ledger import Elsewhere

TENANT_MEMORY_S = 60.0
"""Seconds after the last request's end for which a tenant keeps a share."""
MAX_RECENT_TENANTS = 1024
"""Tenants without requests that are remembered."""
WEIGHT_UNIT = 2.0**-20


class TenantCounts:
    """Numbers of requests by tenant, and tenants that had requests lately. Costs grow with neither.

    Weights are counted in multiples of `WEIGHT_UNIT`, so that sums are exact.
    """

    def __init__(self) -> None:
        self._here: dict[str, int] = {}
        self._total = 0
        self._lately: OrderedDict[str, float] = OrderedDict()  # tenants without requests: their last request's end
        self._weights: dict[str, int] = {}  # of all tenants above
        self._weight = 0

    def came(self, key: QueueKey) -> None:
        """A tenant has one more request."""
        tenant, parts = key.tenant, _weight_units(key.weight)
        self._here[tenant] = self._here.get(tenant, 0) + 1
        self._total += 1
        self._lately.pop(tenant, None)
        self._weight += parts - self._weights.get(tenant, 0)
        self._weights[tenant] = parts

    def left(self, tenant: str, now: float) -> None:
        """A tenant has one request less."""
        self._total -= 1
        self._here[tenant] -= 1
        if not self._here[tenant]:
            del self._here[tenant]
            self._lately[tenant] = now
            if len(self._lately) > MAX_RECENT_TENANTS:
                self._forget()

    def above_share(self, key: QueueKey, elsewhere: Elsewhere, now: float) -> bool:
        """Whether the tenant has more than a fair share of the requests, and others have, or lately had, requests.

        `elsewhere`: requests at other conductors, which count, too.
        """
        while self._lately and next(iter(self._lately.values())) < now - TENANT_MEMORY_S:
            self._forget()
        parts, tenant = _weight_units(key.weight), key.tenant
        others = [name for name in elsewhere.weights if name not in self._weights and name != tenant]
        whole = self._weight - self._weights.get(tenant, 0) + parts
        whole += sum([_weight_units(elsewhere.weights[other]) for other in others])
        own = self._here.get(tenant, 0) + elsewhere.running.get(tenant, 0)
        # Alone there is nobody to leave anything to.
        return whole > parts and own * whole > parts * (self._total + sum(elsewhere.running.values()))

    def _forget(self) -> None:
        """Forget the tenant that has had no request for longest."""
        tenant, _ = self._lately.popitem(last=False)
        self._weight -= self._weights.pop(tenant)

    def check_invariants(self, here: Mapping[str, int]) -> None:
        """Assert that these are the requests."""
        assert self._here == here
        assert self._total == sum(here.values())
        assert self._weights.keys() == self._here.keys() | self._lately.keys()
        assert not self._here.keys() & self._lately.keys()
        assert self._weight == sum(self._weights.values())
        assert len(self._lately) <= MAX_RECENT_TENANTS

    def digest(self) -> bytes:
        return digest_of(self._here, self._lately, self._weights)


def _weight_units(weight: float) -> int:
    return max(1, round(weight / WEIGHT_UNIT))
