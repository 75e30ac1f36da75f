"""Tenants with requests at a decode instance, now or a moment ago."""

from moonpool.base.scheduling.state_machine import digest_of

LINGER_S = 1.0
"""Seconds for which a tenant counts as present after the end of its last request: the next one may follow."""


class PresentTenants:
    """Counts requests by tenant.

    What a tenant's steps cost others is bounded while others are present. A tenant that sends one request after the
    other stays present between two of them. Else each of its requests would come behind long steps.
    """

    def __init__(self) -> None:
        self._requests: dict[str, int] = {}
        self._left: dict[str, float] = {}  # when a tenant's last request ended; the earliest first

    def add(self, tenant: str) -> None:
        """Count a request."""
        self._requests[tenant] = self._requests.get(tenant, 0) + 1
        self._left.pop(tenant, None)

    def remove(self, tenant: str, now: float) -> None:
        """Count a request no more."""
        self._requests[tenant] -= 1
        if not self._requests[tenant]:
            del self._requests[tenant]
            self._left[tenant] = now

    def several(self, now: float) -> bool:
        """Return whether more than one tenant is present."""
        while self._left and now - self._left[first := next(iter(self._left))] > LINGER_S:
            del self._left[first]
        return len(self._requests) + len(self._left) > 1

    def digest(self) -> bytes:
        """Return a hash of who is present, and who has left."""
        return digest_of(self._requests, self._left)

    def check_invariants(self, tenants: list[str]) -> None:
        """Assert that exactly these requests' tenants are counted."""
        assert self._requests == {tenant: tenants.count(tenant) for tenant in tenants}
        assert not self._left.keys() & self._requests.keys()
