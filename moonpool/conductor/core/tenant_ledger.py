"""What the requests of each tenant use at all conductors together: budgets, and what waits elsewhere.

A conductor counts its own requests at once. It tells two instances what each tenant used (`TellActivity`), and all
instances pass on to each conductor, with their load reports, what others have told them (`ConductorActivity`). So what
others use is known half a heartbeat late. Messages have sums since a conductor's start and ages, no times: a message
that is lost or comes twice changes nothing, and clocks may differ.

If a conductor was not heard of for some heartbeats, or this conductor has just begun, sums say nothing about when
something was used. Then the larger of both views of a budget counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import takewhile
from math import ceil, inf

from moonpool.base.scheduling.fair_share import MAX_TENANTS, QueueKey
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.conductor.core.failures import Failure, FailureKind
from moonpool.conductor.core.shared_budget import BUDGET_RETRY_S, SharedBudget
from moonpool.conductor.core.tenant_activity import (
    OTHER_TENANTS,
    UNLIMITED,
    ConductorActivity,
    TellActivity,
    TenantActivity,
    TenantBudget,
)

HOLDERS = 2
"""Instances that are told; the loss of one loses nothing."""
LIVE_HEARTBEATS = 5.0
"""Heartbeats for which what a conductor has told counts as its state now."""
MAX_ROWS = 512
"""Rows in a message."""
MAX_CONDUCTORS = 64
"""Conductors, and their earlier starts, that are remembered."""


class TenantLedger:
    """What tenants use here and at other conductors.

    Args:
        budgets: by tenant; `OTHER_TENANTS` is for all that are not named.
        heartbeat_s: in which what others use becomes known, twice.
    """

    def __init__(self, budgets: Mapping[str, TenantBudget], heartbeat_s: float) -> None:
        self._budgets = budgets
        self._heartbeat_s = heartbeat_s
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # the last changed one last
        self._others: dict[tuple[str, int], _Other] = {}
        self._told: dict[str, int] = {}  # the version that each instance has which may be told
        self._version = 0
        self._number = 0
        self._elsewhere = Elsewhere()

    # --- requests here ----------------------------------------------------------------------------------------------

    def refusal(self, tenant: str, answers: int, now: float) -> Failure | None:
        """Return why a new request of so many answers is refused; None = it may come."""
        limits = self._limits(tenant)
        if limits is UNLIMITED:
            return None
        mine = self._of(tenant, now)
        others = self.elsewhere(now)
        if now >= mine.look_at:
            self._look(mine, limits, tenant, others, now)
        for what, budget in (("request", mine.request_budget), ("token", mine.token_budget)):
            if budget is not None and (wait_s := budget.wait_s(now)) > 0:
                return budget.refusal(what, wait_s)
        there = others.running.get(tenant, 0)
        free = inf if limits.concurrent is None else min(mine.places, limits.concurrent - mine.running - there)
        if free >= answers or not mine.running + there:
            return None
        message = f"the tenant has {mine.running + there} of {limits.concurrent} answers that it may have at once"
        return Failure(FailureKind.OVERLOADED, message, reason="concurrent_budget", retry_after_s=BUDGET_RETRY_S)

    def _look(self, mine: _Tenant, limits: TenantBudget, tenant: str, others: Elsewhere, now: float) -> None:
        """Take this conductor's part of what is left. What others take meanwhile is known when it looks again."""
        parts = 1 + others.conductors
        mine.look_at = now + self._heartbeat_s
        for budget in (mine.request_budget, mine.token_budget):
            if budget is not None:
                budget.look(parts, now)
        if limits.concurrent is not None:
            free = limits.concurrent - mine.running - others.running.get(tenant, 0)
            mine.places = inf if parts == 1 else ceil(max(free, 0) / parts)

    def began(self, tenant: str, weight: float, answers: int, now: float, *, charged: bool) -> None:
        """A request has come. Resumed ones were charged before, maybe at another conductor."""
        mine = self._changed(tenant, now)
        mine.weight = weight
        mine.running += answers
        mine.places -= answers
        if not charged:
            return
        mine.requests += answers
        if mine.request_budget is not None:
            mine.request_budget.take(answers, now)

    def placed(self, tenant: str, work_s: float, tokens: int, now: float) -> None:
        """A request was placed for the first time: predicted instance seconds, and tokens of the prompt."""
        self._changed(tenant, now).work_s += work_s
        self.used(tenant, tokens, now)

    def used(self, tenant: str, tokens: int, now: float) -> None:
        mine = self._changed(tenant, now)
        mine.tokens += tokens
        if mine.token_budget is not None:
            mine.token_budget.take(tokens, now)

    def ended(self, tenant: str, answers: int, now: float) -> None:
        mine = self._changed(tenant, now)
        mine.running -= answers
        mine.places += answers

    def waits(self, tenant: str, blocks: int, work_s: float, now: float) -> None:
        """A request begins to wait for decode memory."""
        mine = self._changed(tenant, now)
        mine.waiting += 1
        mine.waiting_blocks += blocks
        mine.waiting_s += work_s

    def waited(self, tenant: str, blocks: int, work_s: float, now: float) -> None:
        """A request no longer waits for decode memory."""
        mine = self._changed(tenant, now)
        mine.waiting -= 1
        mine.waiting_blocks -= blocks
        mine.waiting_s = mine.waiting_s - work_s if mine.waiting else 0.0

    # --- other conductors -------------------------------------------------------------------------------------------

    def elsewhere(self, now: float) -> Elsewhere:
        """Return what tenants have at other conductors."""
        if now < self._elsewhere.until:
            return self._elsewhere
        found = self._elsewhere = Elsewhere(until=inf)
        for other in self._others.values():
            ends_at = other.told_at + LIVE_HEARTBEATS * self._heartbeat_s
            if ends_at <= now:
                continue
            found.conductors += 1
            found.until = min(found.until, ends_at)
            for row in other.rows.values():
                if row.running:
                    found.running[row.tenant] = found.running.get(row.tenant, 0) + row.running
                    found.weights[row.tenant] = row.weight
                if row.waiting:
                    found.waiting.append(row)
        return found

    def blocks_ahead(self, key: QueueKey, time: float, time_of: Callable[[str], float], now: float) -> int:
        """Return the number of blocks at decode of what waits at other conductors and goes before a request.

        Args:
            key: of the request.
            time: the virtual time of the request's tenant at which the request is next.
            time_of: a tenant's virtual time.
            now: seconds.
        """
        total = 0.0
        for row in self.elsewhere(now).waiting:
            behind_s = (time - time_of(row.tenant)) * row.weight
            if row.tenant != key.tenant and behind_s > 0:
                first = ceil(behind_s * row.waiting / row.waiting_s) if row.waiting_s > 0 else row.waiting
                total += row.waiting_blocks * min(first / row.waiting, 1.0)
        return ceil(total)

    def heard(self, told: Sequence[ConductorActivity], now: float) -> list[TenantActivity]:
        """Take what an instance has passed on.

        Returns:
            What tenants have used at other conductors since they were last heard of: `work_s` counts.
        """
        news: list[TenantActivity] = []
        for use in told:
            name, told_at = (use.conductor, use.epoch), now - use.age_s
            other = self._others.get(name)
            follows = other is not None and told_at - other.told_at <= LIVE_HEARTBEATS * self._heartbeat_s
            if use.tenants or not follows:
                self._elsewhere.until = -inf
            if other is None:
                other = self._others[name] = _Other(told_at)
                self._forget_others()
            other.told_at = max(other.told_at, told_at)
            other.whole = other.whole and not use.more
            for row in use.tenants:
                seen = other.rows.get(row.tenant)
                if seen is not None and row.version <= seen.version:
                    continue
                other.rows[row.tenant] = row
                other.rows.move_to_end(row.tenant)
                # Growth is what was used since the last look. Without such a look, sums do not say when: the debt does.
                if follows and (seen is not None or other.whole):
                    news.append(self._grew(row, seen, now))
                else:
                    self._adopt(row, now)
            while len(other.rows) > MAX_TENANTS:
                other.rows.popitem(last=False)
            other.whole = not use.more and len(other.rows) < MAX_TENANTS
        return news

    def _grew(self, row: TenantActivity, seen: TenantActivity | None, now: float) -> TenantActivity:
        """Count what was used since a row was seen. Sums that are smaller have begun anew."""
        if seen is not None and (row.requests < seen.requests or row.tokens < seen.tokens):
            seen = None
        requests = row.requests - (seen.requests if seen is not None else 0)
        tokens = row.tokens - (seen.tokens if seen is not None else 0)
        work_s = row.work_s - (seen.work_s if seen is not None else 0.0)
        mine = self._of(row.tenant, now)
        if mine.request_budget is not None:
            mine.request_budget.taken_elsewhere(requests, now)
        if mine.token_budget is not None:
            mine.token_budget.taken_elsewhere(tokens, now)
        return TenantActivity(row.tenant, row.version, row.weight, requests, tokens, work_s)

    def _adopt(self, row: TenantActivity, now: float) -> None:
        mine = self._of(row.tenant, now)
        if mine.request_budget is not None:
            mine.request_budget.owe(row.requests_owed, row.age_s, now)
        if mine.token_budget is not None:
            mine.token_budget.owe(row.tokens_owed, row.age_s, now)

    def _forget_others(self) -> None:
        """Keep few conductors of earlier starts."""
        while len(self._others) > MAX_CONDUCTORS:
            del self._others[min(self._others, key=lambda name: self._others[name].told_at)]

    # --- instances --------------------------------------------------------------------------------------------------

    def tells(self, instance: str, conductors: int, now: float) -> TellActivity | None:
        """Return what an instance is told that has reported; None = nothing.

        Args:
            instance: the instance.
            conductors: to which the instance reports. Budgets are told to one's own next start, too.
            now: seconds.
        """
        if conductors < 2 and not (conductors and self._budgets):
            return None
        before = self._told.setdefault(instance, 0)
        if instance not in nsmallest(HOLDERS, self._told):
            return None
        changed = list(takewhile(lambda tenant: self._tenants[tenant].version > before, reversed(self._tenants)))[::-1]
        rows = [self._tenants[tenant].told(tenant, now) for tenant in changed[:MAX_ROWS]]
        more = len(changed) > MAX_ROWS
        self._told[instance] = rows[-1].version if more else self._version
        self._number += 1
        return TellActivity(instance, self._number, tuple(rows), more)

    def left(self, instance: str) -> None:
        """An instance has left, or begun anew: it has not been told anything."""
        self._told.pop(instance, None)

    # --- upkeep -----------------------------------------------------------------------------------------------------

    def _limits(self, tenant: str) -> TenantBudget:
        if not self._budgets:
            return UNLIMITED
        return self._budgets.get(tenant) or self._budgets.get(OTHER_TENANTS, UNLIMITED)

    def _of(self, tenant: str, now: float) -> _Tenant:
        mine = self._tenants.get(tenant)
        if mine is None:
            limits = self._limits(tenant)
            mine = _Tenant(
                request_budget=SharedBudget(limits.requests, now) if limits.requests is not None else None,
                token_budget=SharedBudget(limits.tokens, now) if limits.tokens is not None else None,
            )
            self._tenants[tenant] = mine
            self._tenants.move_to_end(tenant, last=False)  # nothing of it is to be told yet
            if len(self._tenants) > MAX_TENANTS:
                self._forget(tenant)
        return mine

    def _forget(self, new: str) -> None:
        """Forget the tenants without requests that changed longest ago, half of all."""
        idle = [name for name, tenant in self._tenants.items() if name != new and not tenant.running]
        for name in idle[: MAX_TENANTS // 2]:
            del self._tenants[name]

    def _changed(self, tenant: str, now: float) -> _Tenant:
        mine = self._of(tenant, now)
        self._version += 1
        mine.version = self._version
        self._tenants.move_to_end(tenant)
        return mine

    def check_invariants(self, running: Mapping[str, int], waiting: Mapping[str, int]) -> None:
        """Assert that these are the answers that have not ended, and the requests that wait for memory."""
        versions = [tenant.version for tenant in self._tenants.values()]
        assert versions == sorted(versions)
        assert {name: tenant.running for name, tenant in self._tenants.items() if tenant.running} == running
        assert {name: tenant.waiting for name, tenant in self._tenants.items() if tenant.waiting} == waiting

    def digest(self) -> bytes:
        return digest_of(self._tenants, self._others, self._told, self._number)


@dataclass(slots=True)
class _Tenant:
    """A tenant's use at this conductor, and its budgets. `places`: answers that may begin until the next look."""

    weight: float = 1.0
    version: int = 0
    requests: int = 0
    tokens: int = 0
    work_s: float = 0.0
    running: int = 0
    waiting: int = 0
    waiting_blocks: int = 0
    waiting_s: float = 0.0
    request_budget: SharedBudget | None = None
    token_budget: SharedBudget | None = None
    places: float = inf
    look_at: float = -inf

    def told(self, tenant: str, now: float) -> TenantActivity:
        budgets = self.request_budget, self.token_budget
        owed = [0.0 if budget is None else budget.owed(now) for budget in budgets]
        use = self.requests, self.tokens, self.work_s, self.running
        return TenantActivity(
            tenant, self.version, self.weight, *use, self.waiting, self.waiting_blocks, self.waiting_s, *owed
        )


@dataclass(slots=True)
class _Other:
    """Another conductor. `whole`: `rows` has every row that the conductor has."""

    told_at: float
    rows: OrderedDict[str, TenantActivity] = field(default_factory=OrderedDict)
    whole: bool = True


@dataclass(slots=True)
class Elsewhere:
    """What tenants have at other conductors that are there.

    Attributes:
        conductors: the other conductors.
        running: answers, by tenant.
        waiting: rows of tenants that wait for decode memory.
        until: when this must be counted anew.
    """

    conductors: int = 0
    running: dict[str, int] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    waiting: list[TenantActivity] = field(default_factory=list)
    until: float = -inf
