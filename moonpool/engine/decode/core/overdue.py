"""Grants: a preempted request that waited long beside other tenants is restored at the cost of others, one at a time.

Other rules say which request is restored first. No other rule bounds the wait, because a stream of other requests can
take each block and each slot that becomes free. A grant bounds the wait: the holder gets blocks and slots from others,
and keeps them for some steps. A grant makes tokens, which preemption does not lose, so each grant brings all requests
nearer to their end. Tenants hold grants one after the other. So a tenant's first request waits for the request's
patience (`patience_steps`, longer if the request needs much), and for a grant of each other tenant.
"""

from collections import Counter

from moonpool.engine.decode.core.batch import RunningBatch
from moonpool.engine.decode.core.preemption import PreemptedRequests
from moonpool.engine.decode.core.request import DecodeRequest, RequestStatus
from moonpool.engine.decode.core.restoring import blocks_to_resume, window_blocks_to_resume
from moonpool.engine.decode.core.state import DecodeState
from moonpool.engine.decode.core.tenant_shares import TenantUse, block_use, by_tenant

MOST_PATIENCE = 8.0
"""Factor by which a request that needs many times the tenant's block share waits longer than others, at most."""

_OVER = (RequestStatus.FINISHING, RequestStatus.PARKED)


class OverdueGrants:
    """Gives grants to preempted requests.

    Requests with a promised time between tokens never give way. Earlier requests of the holder's tenant never give way,
    either.

    Args:
        state: shared state of the scheduler.
        preempted: the preempted requests.

    Attributes:
        holder: the request with the grant; None if no request is overdue, or none can be served.
    """

    def __init__(self, state: DecodeState, preempted: PreemptedRequests) -> None:
        self._state, self._settings = state, state.settings
        self._preempted = preempted
        self.holder: DecodeRequest | None = None
        self._left = 0  # steps of the grant
        self._last: dict[str, int] = {}  # by tenant, when its last grant began

    def choose(self, active: list[DecodeRequest], waiting: list[DecodeRequest]) -> list[DecodeRequest]:
        """Return who may hold the grant now, best first: the holder, or one for each tenant with overdue requests.

        Args:
            active: requests that run or could run.
            waiting: active requests that wait for a batch slot.
        """
        if self.holder is not None and (self._left <= 0 or self.holder.status in _OVER):
            self.holder = None
        if self.holder is not None:
            return [self.holder]
        late = [
            other
            for other in (*self._preempted.queue, *waiting)
            if self._waited(other) >= self._settings.patience_steps
        ]
        everyone = [*active, *self._preempted.queue] if late else []
        tenants = {request.spec.tenant for request in everyone}
        self._last = {tenant: at for tenant, at in self._last.items() if tenant in tenants}
        if len(tenants) < 2:
            return []
        use = block_use(everyone, self._settings.num_blocks)
        overdue = by_tenant(request for request in late if self._is_overdue(request, use))
        firsts = [min(queue, key=lambda other: other.order_key) for queue in overdue.values()]
        return sorted(
            firsts, key=lambda first: (self._last.get(first.spec.tenant, -1), first.preemption.since, first.order_key)
        )

    def _waited(self, request: DecodeRequest) -> int:
        """Return steps since a request was preempted; -1 if the request was never preempted, or has run since."""
        since = request.preemption.since
        return self._preempted.steps - since if since is not None else -1

    def _is_overdue(self, request: DecodeRequest, use: TenantUse) -> bool:
        shares = blocks_to_resume(request, self._settings) / request.spec.weight / use.level
        return self._waited(request) >= self._settings.patience_steps * min(max(1.0, shares), MOST_PATIENCE)

    def give(self, request: DecodeRequest | None) -> None:
        """Give the grant to a request; None = no request has the grant."""
        if request is not self.holder:
            self.holder, self._left = request, self._settings.grant_steps

    def advance(self, steps: int, running: RunningBatch) -> None:
        """Count steps that the holder ran."""
        if self.holder is not None and self.holder in running:
            self._left -= steps
            self._last[self.holder.spec.tenant] = self._preempted.steps

    def giving_way(self, holder: DecodeRequest, requests: list[DecodeRequest]) -> list[DecodeRequest]:
        """Select the requests that give way to the holder."""
        return [
            request
            for request in requests
            if not request.tbt_slo_s
            and (request.spec.tenant != holder.spec.tenant or request.order_key > holder.order_key)
        ]

    def lacking_blocks(self, holder: DecodeRequest, giving: list[DecodeRequest]) -> int | None:
        """Return blocks, or window blocks, that a preempted request lacks now.

        None if the holder lacked blocks even after all of `giving` gave theirs.
        """
        blocks, budget = self._state.blocks, self._state.budget
        held, new = self._preempted.blocks_to_restore(holder)
        refs = Counter(block for request in giving for block in request.refs)
        freed = {block for block, count in refs.items() if blocks.ref_count(block) == count}
        soon = budget.available + self._preempted.blocks_being_freed + len(freed)
        windows = window_blocks_to_resume(holder, self._settings) - budget.window_blocks_available
        given = sum(
            len(sequence.table.blocks) - sequence.table.past for request in giving for sequence in request.sequences
        )
        if soon < budget.cost(held, new) + len(freed.intersection(held)) or windows > given:
            return None
        return max(0, budget.cost(held, new) - budget.available, windows)

    def digest(self) -> tuple[object, ...]:
        """Return a hash input: the grant, and each tenant's last grant."""
        return self.holder.id if self.holder is not None else None, self._left, list(self._last.items())

    def check_invariants(self, requests: list[DecodeRequest]) -> None:
        """Assert that the holder is a request of the instance."""
        assert self.holder is None or self.holder.status in _OVER or self.holder in requests
