"""Budgets over several conductors: two ledgers, and what passes between them."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from moonpool.base.scheduling.fair_share import MAX_TENANTS, QueueKey
from moonpool.conductor.core.failures import Failure
from moonpool.conductor.core.tenant_activity import ConductorActivity, TenantActivity, TenantBudget
from moonpool.conductor.core.tenant_ledger import LIVE_HEARTBEATS, MAX_ROWS, TenantLedger

LAG_S = 0.5
"""From one conductor to another: a report to the first, and a report to the second."""
MINUTE_S = 60.0
GONE_S = LIVE_HEARTBEATS + 1.0


class Conductors:
    """Ledgers of conductors that all instances report to; what one tells, the others hear `LAG_S` later."""

    def __init__(self, budget: TenantBudget, count: int = 2) -> None:
        self.now = 0.0
        self._budgets = {"ann": budget}
        self._starts = [0] * count
        self.ledgers = [self._new() for _ in range(count)]
        self._told: list[tuple[float, int, int, tuple[TenantActivity, ...]]] = []
        """When, by whom, by which start of it, and what."""
        self.known: dict[tuple[int, int], dict[str, tuple[float, TenantActivity]]] = {}
        """What an instance has of each start, with the time at which it came."""
        self.apart = False
        self.admitted = [0] * count

    def _new(self) -> TenantLedger:
        return TenantLedger(self._budgets, heartbeat_s=1.0)

    def restart(self, number: int) -> None:
        """A conductor begins anew, and hears what instances have."""
        self._starts[number] += 1
        self.ledgers[number] = self._new()
        if not self.apart:
            self._hear(number, self.known)

    def meet(self) -> None:
        """All instances report to all conductors."""
        for number, ledger in enumerate(self.ledgers):
            told = ledger.tells("prefill-0", len(self.ledgers), self.now)
            assert told is not None
            self._told.append((self.now, number, self._starts[number], told.tenants))
        while self._told and self._told[0][0] <= self.now - LAG_S:
            at, teller, start, rows = self._told.pop(0)
            known = self.known.setdefault((teller, start), {})
            known |= {row.tenant: (at, row) for row in rows}
            news = {(teller, start): {row.tenant: (at, row) for row in rows}}
            for hearer in range(len(self.ledgers)):
                if not self.apart and (hearer, self._starts[hearer]) != (teller, start):
                    self._hear(hearer, news)

    def _hear(self, hearer: int, news: Mapping[tuple[int, int], Mapping[str, tuple[float, TenantActivity]]]) -> None:
        for (teller, start), rows in news.items():
            age_s = min([self.now - at for at, _ in rows.values()], default=LAG_S)
            aged = tuple([replace(row, age_s=self.now - at) for at, row in rows.values()])
            self.ledgers[hearer].heard([ConductorActivity(f"conductor-{teller}", start, age_s, aged)], self.now)

    def ask(self, number: int, answers: int = 1, tokens: int = 0) -> Failure | None:
        """A request that ends at once."""
        ledger = self.ledgers[number]
        refusal = ledger.refusal("ann", answers, self.now)
        if refusal is None:
            ledger.began("ann", 1.0, answers, self.now, charged=True)
            ledger.placed("ann", 0.1, tokens, self.now)
            ledger.ended("ann", answers, self.now)
            self.admitted[number] += answers
        return refusal

    def rest(self, seconds: float) -> None:
        """Nothing comes; instances report."""
        for _ in range(round(4 * seconds)):
            self.now += 0.25
            self.meet()

    def go_on(self, seconds: float, per_s: int, tokens: int = 0) -> None:
        """So many requests a second come to each conductor."""
        for _ in range(round(seconds * per_s)):
            self.now += 1 / per_s
            self.meet()
            for number in range(len(self.ledgers)):
                self.ask(number, tokens=tokens)


def test_a_tenant_has_one_budget_at_two_conductors() -> None:
    both = Conductors(TenantBudget(requests=60))
    both.meet()
    both.go_on(240, per_s=4)  # four times the budget at each
    assert 300 <= sum(both.admitted) <= 1.02 * 300, "a full bucket, and four minutes"
    assert min(both.admitted) >= 0.4 * sum(both.admitted)


def test_a_burst_through_both_is_not_admitted_twice() -> None:
    both = Conductors(TenantBudget(requests=60))
    both.go_on(2.0, per_s=4)
    both.rest(MINUTE_S)  # it is full again
    before = sum(both.admitted)
    for _ in range(100):
        both.ask(0), both.ask(1)
    assert sum(both.admitted) - before <= 60
    refusal = both.ask(0)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after_s) == ("request_budget", 1.0)


def test_a_tenant_that_uses_one_of_two_conductors_gets_all() -> None:
    both = Conductors(TenantBudget(requests=60))
    both.meet()
    for _ in range(480):
        both.now += 0.25
        both.meet()
        both.ask(1)
    assert both.admitted[1] >= 0.97 * 180


def test_tokens_are_charged_everywhere() -> None:
    both = Conductors(TenantBudget(tokens=6000))
    both.meet()
    both.go_on(240, per_s=2, tokens=100)  # twice the budget at each
    assert 0.97 * 300 <= sum(both.admitted) <= 1.05 * 300
    refusal = both.ask(0)
    assert refusal is not None
    assert refusal.reason == "token_budget"


def test_requests_at_once_count_everywhere() -> None:
    both = Conductors(TenantBudget(concurrent=4))
    both.meet()
    both.rest(LAG_S)
    for number in (0, 1, 0, 1, 0, 1):
        if both.ledgers[number].refusal("ann", 1, both.now) is None:
            both.ledgers[number].began("ann", 1.0, 1, both.now, charged=True)
            both.admitted[number] += 1
    assert both.admitted == [2, 2]
    both.rest(2.0)
    refusal = both.ask(0)
    assert refusal is not None
    assert refusal.reason == "concurrent_budget"
    assert "4 of 4" in refusal.message
    both.ledgers[0].ended("ann", 1, both.now)
    assert both.ask(0) is None


def test_a_request_of_many_answers_may_come_alone() -> None:
    both = Conductors(TenantBudget(concurrent=4))
    assert both.ask(0, answers=8) is None
    both.ledgers[0].began("ann", 1.0, 1, both.now, charged=True)
    assert both.ask(0, answers=8) is not None


@pytest.mark.parametrize("count", [1, 2])
def test_a_conductor_that_begins_anew_has_no_new_budget(count: int) -> None:
    conductors = Conductors(TenantBudget(requests=60), count)
    conductors.meet()
    conductors.go_on(30, per_s=8)
    conductors.rest(LAG_S)
    before = sum(conductors.admitted)
    conductors.restart(0)
    conductors.go_on(60, per_s=8)
    assert sum(conductors.admitted) - before <= 66


def test_use_during_a_partition_is_not_charged_at_once_afterwards() -> None:
    """What another conductor used long ago says nothing about now: its view of the budget counts."""
    both = Conductors(TenantBudget(requests=60))
    both.meet()
    both.go_on(5, per_s=1)
    both.apart = True
    for _ in range(600):
        both.now += 1.0
        both.meet()
        both.ask(1)
    both.apart = False
    both.rest(LAG_S)
    assert both.ask(0) is None


def test_what_a_silent_conductor_had_running_counts_no_more() -> None:
    both = Conductors(TenantBudget(concurrent=1))
    both.meet()
    both.ledgers[0].began("ann", 1.0, 1, both.now, charged=True)
    both.rest(2 * LAG_S)
    assert both.ask(1) is not None
    both.now += GONE_S
    assert both.ask(1) is None


def test_rows_that_come_twice_or_late_change_nothing() -> None:
    ledger = TenantLedger({"ann": TenantBudget(requests=60)}, 1.0)
    ledger.heard([ConductorActivity("conductor-1", 1, 0.0)], 0.0)
    new, old = (TenantActivity("ann", version, requests=count, work_s=count) for version, count in ((7, 5), (6, 3)))
    [news] = ledger.heard([ConductorActivity("conductor-1", 1, 0.0, (new,))], 1.0)
    assert (news.requests, news.work_s) == (5, 5)
    for again in (new, old):
        assert ledger.heard([ConductorActivity("conductor-1", 1, 0.0, (again,))], 1.0) == []
    later = TenantActivity("ann", 8, requests=6, work_s=8.0)
    [news] = ledger.heard([ConductorActivity("conductor-1", 1, 0.0, (later,))], 1.5)
    assert (news.requests, news.work_s) == (1, 3.0)


def test_two_instances_are_told_and_another_one_if_one_leaves() -> None:
    ledger = TenantLedger({}, 1.0)
    ledger.began("ann", 1.0, 1, 0.0, charged=True)
    told = {name: ledger.tells(name, 2, 0.0) for name in ("decode-0", "prefill-0", "prefill-1")}
    assert [name for name, item in told.items() if item is not None] == ["decode-0", "prefill-0"]
    again = ledger.tells("decode-0", 2, 0.1)
    assert again is not None
    assert again.tenants == (), "only what has changed"
    ledger.left("decode-0")
    other = ledger.tells("prefill-1", 2, 0.2)
    assert other is not None
    assert [row.tenant for row in other.tenants] == ["ann"]


def test_a_single_conductor_without_budgets_tells_nothing() -> None:
    assert TenantLedger({}, 1.0).tells("decode-0", 1, 0.0) is None
    assert TenantLedger({"*": TenantBudget(requests=1)}, 1.0).tells("decode-0", 1, 0.0) is not None
    assert TenantLedger({"*": TenantBudget(requests=1)}, 1.0).tells("decode-0", 0, 0.0) is None


def test_the_star_is_for_each_tenant_that_is_not_named() -> None:
    ledger = TenantLedger({"ann": TenantBudget(requests=2), "*": TenantBudget(requests=1)}, 1.0)

    def admitted(tenant: str) -> int:
        count = 0
        while ledger.refusal(tenant, 1, 0.0) is None:
            ledger.began(tenant, 1.0, 1, 0.0, charged=True)
            count += 1
        return count

    assert [admitted(tenant) for tenant in ("ann", "bob", "cid")] == [2, 1, 1]


def test_blocks_of_requests_elsewhere_that_go_before() -> None:
    """Of a tenant that is behind, as many requests as its virtual time takes to catch up."""
    ledger = TenantLedger({}, 1.0)
    ledger.heard([ConductorActivity("conductor-1", 1, 0.0)], 0.0)
    rows = (
        TenantActivity("bob", 1, weight=2.0, waiting=4, waiting_blocks=40, waiting_s=8.0),
        TenantActivity("ann", 2, waiting=3, waiting_blocks=30, waiting_s=3.0),
        TenantActivity("far", 3, waiting=5, waiting_blocks=50, waiting_s=5.0),
    )
    ledger.heard([ConductorActivity("conductor-1", 1, 0.0, rows)], 0.0)
    times = {"ann": 10.0, "bob": 7.5, "far": 11.0}
    key = QueueKey("ann", 0.0, 1)
    assert ledger.blocks_ahead(key, 10.0, times.__getitem__, 0.0) == 30, "2.5 s at weight 2 are three requests of 2 s"
    assert ledger.blocks_ahead(key, 7.5, times.__getitem__, 0.0) == 0
    assert ledger.blocks_ahead(key, 100.0, times.__getitem__, 0.0) == 90
    assert ledger.blocks_ahead(key, 100.0, times.__getitem__, GONE_S) == 0, "nobody is there any more"


def test_many_rows_are_told_in_parts_and_the_parts_are_no_use_of_now() -> None:
    ledger = TenantLedger({}, 1.0)
    for number in range(MAX_ROWS + 1):
        ledger.began(f"t{number}", 1.0, 1, 0.0, charged=True)
    first, second = ledger.tells("decode-0", 2, 0.0), ledger.tells("decode-0", 2, 0.1)
    assert first is not None
    assert second is not None
    assert second.number > first.number, "or an instance cannot tell which is newer"
    assert (len(first.tenants), first.more) == (MAX_ROWS, True)
    assert ([row.tenant for row in second.tenants], second.more) == ([f"t{MAX_ROWS}"], False)
    other = TenantLedger({"*": TenantBudget(requests=1)}, 1.0)
    for told, now in ((first, 0.5), (second, 0.6)):
        heard = ConductorActivity("conductor-1", 1, 0.0, told.tenants, told.more)
        assert other.heard([heard], now) == [], "what began before this one heard of it"
    later = ConductorActivity("conductor-1", 1, 0.0, (TenantActivity("new", MAX_ROWS + 2, requests=1),))
    assert [served.requests for served in other.heard([later], 0.7)] == [1]


def test_a_tenant_that_another_conductor_has_forgotten_begins_anew() -> None:
    ledger = TenantLedger({}, 1.0)
    ledger.heard([ConductorActivity("conductor-1", 1, 0.0, (TenantActivity("ann", 1, requests=9, tokens=90),))], 0.0)
    anew = ConductorActivity("conductor-1", 1, 0.0, (TenantActivity("ann", 5, requests=2, tokens=20),))
    [news] = ledger.heard([anew], 0.1)
    assert (news.requests, news.tokens) == (2, 20)


def test_tenants_without_requests_are_forgotten_and_those_with_some_are_not() -> None:
    ledger = TenantLedger({"*": TenantBudget(requests=1)}, 1.0)
    ledger.began("old", 1.0, 1, 0.0, charged=True)
    for number in range(2 * MAX_TENANTS):
        ledger.began(f"t{number}", 1.0, 1, 0.0, charged=True)
        ledger.ended(f"t{number}", 1, 0.0)
    ledger.check_invariants({"old": 1}, {})
    assert ledger.refusal("old", 1, 0.0) is not None
    assert ledger.refusal("t0", 1, 0.0) is None, "its budget is forgotten, too"


def test_rows_of_others_that_changed_longest_ago_are_forgotten_first() -> None:
    ledger = TenantLedger({}, 1.0)
    ledger.heard([ConductorActivity("conductor-1", 1, 0.0)], 0.0)

    def tell(*versions: int) -> list[TenantActivity]:
        rows = tuple([TenantActivity(f"t{version % MAX_TENANTS}", version, requests=version) for version in versions])
        return ledger.heard([ConductorActivity("conductor-1", 1, 0.0, rows)], 0.1)

    tell(*range(1, MAX_TENANTS + 1))
    tell(MAX_TENANTS + 1)  # the first one changes again
    new = TenantActivity("new", 2 * MAX_TENANTS, requests=1)
    ledger.heard([ConductorActivity("conductor-1", 1, 0.0, (new,))], 0.2)
    again = TenantActivity("t1", 3 * MAX_TENANTS, requests=MAX_TENANTS + 3)
    [news] = ledger.heard([ConductorActivity("conductor-1", 1, 0.0, (again,))], 0.3)
    assert news.requests == 2, "it is not the one that was forgotten"
    other = TenantActivity("t2", 4 * MAX_TENANTS, requests=9)
    assert ledger.heard([ConductorActivity("conductor-1", 1, 0.0, (other,))], 0.4) == []


@pytest.mark.parametrize(("silent_s", "counted"), [(LIVE_HEARTBEATS, 1), (LIVE_HEARTBEATS + 0.1, 0)])
def test_use_counts_if_the_conductor_was_heard_of_lately(silent_s: float, counted: int) -> None:
    ledger = TenantLedger({}, 1.0)
    ledger.heard([ConductorActivity("conductor-1", 1, 0.0)], 0.0)
    row = TenantActivity("ann", 1, requests=1)
    assert len(ledger.heard([ConductorActivity("conductor-1", 1, 0.0, (row,))], silent_s)) == counted


def test_a_conductor_looks_again_after_a_heartbeat() -> None:
    """Not sooner, and at that time: then another conductor's part is left to it."""
    ledger = TenantLedger({"ann": TenantBudget(concurrent=4)}, heartbeat_s=1.0)
    assert ledger.refusal("ann", 1, 0.0) is None
    ledger.began("ann", 1.0, 1, 0.0, charged=True)
    ledger.heard([ConductorActivity("conductor-1", 1, 0.0)], 0.5)
    assert ledger.refusal("ann", 3, 0.75) is None
    assert ledger.refusal("ann", 3, 1.0) is not None
    assert ledger.refusal("ann", 2, 1.0) is None


def test_what_begins_at_another_conductor_counts_at_once() -> None:
    """Before this one looks again."""
    ledger = TenantLedger({"ann": TenantBudget(concurrent=4)}, heartbeat_s=1.0)
    ledger.heard([ConductorActivity("conductor-1", 1, 0.0)], 0.0)
    assert ledger.refusal("ann", 1, 0.0) is None
    ledger.began("ann", 1.0, 1, 0.0, charged=True)
    assert ledger.refusal("ann", 1, 0.25) is None
    ledger.heard([ConductorActivity("conductor-1", 1, 0.0, (TenantActivity("ann", 1, running=3),))], 0.5)
    assert ledger.refusal("ann", 1, 0.75) is not None


@pytest.mark.parametrize("heartbeat_s", [0.5, 2.0])
def test_a_conductor_is_there_for_some_heartbeats(heartbeat_s: float) -> None:
    ledger, over_s = TenantLedger({}, heartbeat_s), LIVE_HEARTBEATS * heartbeat_s
    ledger.heard([ConductorActivity("conductor-1", 1, 0.0)], 0.0)
    assert [ledger.elsewhere(now).conductors for now in (0.0, over_s - 0.01, over_s)] == [1, 1, 0]
