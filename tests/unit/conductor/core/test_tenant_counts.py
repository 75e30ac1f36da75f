"""What a conductor remembers of tenants that have no requests now."""

from moonpool.base.scheduling.fair_share import QueueKey
from moonpool.conductor.core.tenant_counts import MAX_RECENT_TENANTS, TenantCounts
from moonpool.conductor.core.tenant_ledger import Elsewhere


def counts_of(recent: int) -> TenantCounts:
    """So many tenants had a request a moment ago; `new` has one."""
    counts = TenantCounts()
    for number in range(recent):
        counts.came(QueueKey(f"t{number}", 0.0, number))
        counts.left(f"t{number}", 0.0)
    counts.came(QueueKey("new", 0.0, recent))
    return counts


def remembered(counts: TenantCounts) -> int:
    """A number that grows with tenants that lately had requests: of so many requests, one is above a tenant's share."""
    key, most = QueueKey("new", 0.0, 0), 2 * MAX_RECENT_TENANTS
    return sum(counts.above_share(key, Elsewhere(1, {"other": running}, {}), 1.0) for running in range(most))


def test_as_many_tenants_are_remembered_as_there_is_room_for() -> None:
    full = remembered(counts_of(MAX_RECENT_TENANTS))
    assert remembered(counts_of(MAX_RECENT_TENANTS - 1)) == full - 1
    assert remembered(counts_of(MAX_RECENT_TENANTS + 1)) == full
