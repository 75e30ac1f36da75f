"""Whose requests are here, and who of several tenants leaves some of decode's room to the others."""

from collections import OrderedDict
from collections.abc import Mapping

from moonpool.core.digest import digest_of
from moonpool.core.fair import Place

ABOUT_S = 60.0
"""A tenant is expected to come again for so long after its last request."""
MAX_LATELY = 1024
"""Tenants that are remembered so."""
LEFT_FREE = 16
"""Who has more than its share leaves one in so many blocks of an instance to others."""


def left_free(blocks: int, total: int) -> int:
    """Blocks that a request which needs `blocks` of an instance with `total` leaves to others; fewer if it must."""
    return max(min(total // LEFT_FREE, total - blocks), 0)


class Crowd:
    """Requests by tenant, and tenants that came lately."""

    def __init__(self) -> None:
        self._here: dict[str, int] = {}
        self._total = 0
        self._lately: OrderedDict[str, tuple[float, float]] = OrderedDict()  # when, and its weight; last come last

    def came(self, place: Place, now: float) -> None:
        """A tenant has one more request."""
        self._here[place.tenant] = self._here.get(place.tenant, 0) + 1
        self._total += 1
        self._lately[place.tenant] = now, place.weight
        self._lately.move_to_end(place.tenant)
        if len(self._lately) > MAX_LATELY:
            self._lately.popitem(last=False)

    def left(self, tenant: str) -> None:
        """One of them has ended."""
        self._total -= 1
        self._here[tenant] -= 1
        if not self._here[tenant]:
            del self._here[tenant]

    def leaves_room(self, place: Place, now: float) -> bool:
        """Whether its tenant has more than its share of the requests, and others are here or came lately."""
        while self._lately and next(iter(self._lately.values()))[0] < now - ABOUT_S:
            self._lately.popitem(last=False)
        weights = {tenant: weight for tenant, (_, weight) in self._lately.items()} | {place.tenant: place.weight}
        share = place.weight / sum(weights.values())
        return len(weights) > 1 and self._here.get(place.tenant, 0) > share * self._total

    def check_invariants(self, here: Mapping[str, int]) -> None:
        """Asserts that these are the requests."""
        assert self._here == here
        assert self._total == sum(here.values())

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self._here, self._lately)
