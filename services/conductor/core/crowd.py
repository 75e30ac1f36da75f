"""Counts requests by tenant, and says which tenant has more than its share and leaves some of decode's room free."""

from collections import OrderedDict
from collections.abc import Mapping

from moonpool.core.digest import digest_of
from moonpool.core.fair import Place

ABOUT_S = 60.0
"""A tenant is expected to come again for so long after the end of its last request."""
MAX_LATELY = 1024
"""Tenants that are remembered so."""
PART = 2.0**-20
LEFT_FREE = 16
"""Who has more than its share leaves one in so many blocks of an instance to others."""


def left_free(blocks: int, total: int) -> int:
    """Blocks that a request which needs `blocks` of an instance with `total` leaves to others; fewer if it must."""
    return max(min(total // LEFT_FREE, total - blocks), 0)


class Crowd:
    """Requests by tenant, and tenants that were here lately. What it costs does not grow with either.

    Weights are counted in whole parts of `PART`, so that sums are exact.
    """

    def __init__(self) -> None:
        self._here: dict[str, int] = {}
        self._total = 0
        self._lately: OrderedDict[str, float] = OrderedDict()  # when the last request of those ended who are not here
        self._weights: dict[str, int] = {}  # of all who are here or were lately
        self._weight = 0

    def came(self, place: Place) -> None:
        """A tenant has one more request."""
        tenant, parts = place.tenant, _parts(place.weight)
        self._here[tenant] = self._here.get(tenant, 0) + 1
        self._total += 1
        self._lately.pop(tenant, None)
        self._weight += parts - self._weights.get(tenant, 0)
        self._weights[tenant] = parts

    def left(self, tenant: str, now: float) -> None:
        """One of them has ended."""
        self._total -= 1
        self._here[tenant] -= 1
        if not self._here[tenant]:
            del self._here[tenant]
            self._lately[tenant] = now
            if len(self._lately) > MAX_LATELY:
                self._forget()

    def leaves_room(self, place: Place, now: float) -> bool:
        """Whether its tenant has more than its share of the requests, and others are here or were lately."""
        while self._lately and next(iter(self._lately.values())) < now - ABOUT_S:
            self._forget()
        parts = _parts(place.weight)
        whole = self._weight - self._weights.get(place.tenant, 0) + parts
        return whole > parts and self._here.get(place.tenant, 0) * whole > parts * self._total

    def _forget(self) -> None:
        """Who has not been here for longest is not expected any more."""
        tenant, _ = self._lately.popitem(last=False)
        self._weight -= self._weights.pop(tenant)

    def check_invariants(self, here: Mapping[str, int]) -> None:
        """Asserts that these are the requests."""
        assert self._here == here
        assert self._total == sum(here.values())
        assert self._weights.keys() == self._here.keys() | self._lately.keys()
        assert not self._here.keys() & self._lately.keys()
        assert self._weight == sum(self._weights.values())
        assert len(self._lately) <= MAX_LATELY

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self._here, self._lately, self._weights)


def _parts(weight: float) -> int:
    return max(1, round(weight / PART))
