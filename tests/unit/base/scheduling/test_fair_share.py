"""Shares of tenants: who is next, what a flood costs the others, and who is let in."""

import pickle
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from moonpool.base.errors import InvalidRequest
from moonpool.base.scheduling.fair_share import (
    LEAST_PRIORITY,
    MAX_TENANTS,
    MOST_PRIORITY,
    PRIORITY_S,
    FairQueue,
    FairShares,
    QueueEntry,
    QueueKey,
    check_priority,
    may_admit,
    priority_rank,
)


def queue(shares: FairShares, *wanted: tuple[str, float], weights: dict[str, float] | None = None) -> FairQueue:
    """Tenants and costs, numbered from 1 in the order in which they came."""
    found = FairQueue(shares)
    for number, (tenant, cost) in enumerate(wanted, 1):
        found.add(QueueKey(tenant, priority_rank(float(number), 0), number, (weights or {}).get(tenant, 1.0)), cost)
    found.check_invariants()
    return found


def test_one_tenant_is_served_first_come_first_whatever_it_costs() -> None:
    shares = FairShares()
    fair = queue(shares, ("a", 9.0), ("a", 1.0), ("a", 5.0))
    assert list(fair) == [1, 2, 3]
    shares.serve("a", 100.0)
    assert list(fair) == [1, 2, 3]
    assert fair.first().number == 1


def test_tenants_take_turns_by_cost() -> None:
    fair = queue(FairShares(), ("a", 2.0), ("a", 2.0), ("a", 2.0), ("b", 1.0), ("b", 1.0), ("b", 1.0), ("b", 1.0))
    assert list(fair) == [1, 4, 5, 2, 6, 7, 3]


def test_a_weight_of_two_is_twice_the_share() -> None:
    fair = queue(FairShares(), *[("a", 1.0)] * 3, *[("b", 1.0)] * 6, weights={"b": 2.0})
    tenants = ["a" if number <= 3 else "b" for number in fair]
    assert tenants == ["a", "b", "b", "a", "b", "b", "a", "b", "b"]


def test_what_was_served_counts() -> None:
    shares = FairShares()
    fair = queue(shares, ("a", 1.0), ("b", 1.0))
    shares.serve("a", 3.0)
    assert list(fair) == [2, 1]
    shares.serve("b", 4.0)
    assert list(fair) == [1, 2]
    assert (shares.time("a"), shares.time("b")) == (3.0, 4.0)


def test_who_comes_late_has_saved_up_no_more_than_the_credit() -> None:
    shares = FairShares(credit=5.0)
    for _ in range(1000):
        shares.serve("old", 1.0)
    assert shares.time("new") == shares.time("old") - 1.0 - 5.0
    served = Counter[str]()
    for _ in range(106):
        tenant = min(("old", "new"), key=shares.time)
        served[tenant] += 1
        shares.serve(tenant, 1.0)
    assert served == {"new": 56, "old": 50}, "six to catch up, then in turn"


def test_who_comes_while_little_was_served_is_behind_by_so_much() -> None:
    shares = FairShares(credit=5.0)
    shares.serve("old", 2.0)
    assert (shares.time("old"), shares.time("new")) == (2.0, 0.0)


def test_while_the_server_rests_what_was_served_before_is_forgiven() -> None:
    shares = FairShares(credit=5.0)
    shares.serve("old", 3.0)
    shares.forgive_idle(2.0)
    assert (shares.time("old"), shares.time("new")) == (3.0, 2.0)
    shares.forgive_idle(2.0)
    assert (shares.time("old"), shares.time("new")) == (4.0, 4.0)


def test_a_rest_takes_no_credit_from_who_waits_behind_a_flood() -> None:
    shares = FairShares(credit=5.0)
    for _ in range(1000):
        shares.serve("flood", 1.0)
    ahead = shares.time("flood") - shares.time("calm")
    shares.forgive_idle(1.0)
    assert shares.time("flood") - shares.time("calm") == ahead - 1.0
    shares.serve("flood", 1.0)
    assert shares.time("flood") - shares.time("calm") == ahead, "the first that is served restores it"


def test_idling_gives_the_same_credit_only_once_others_were_served() -> None:
    shares = FairShares(credit=5.0)
    shares.serve("a", 1.0)
    shares.serve("b", 8.0)
    before = shares.time("b")
    assert shares.time("b") == before, "time alone gives nothing"
    for _ in range(30):
        shares.serve("a", 1.0)
    assert shares.time("b") == shares.time("a") - 1.0 - 5.0


def test_a_priority_is_a_head_start_in_time() -> None:
    fair = FairQueue(FairShares())
    fair.add(QueueKey("a", priority_rank(0.0, 1), 1))
    fair.add(QueueKey("a", priority_rank(PRIORITY_S - 1.0, 0), 2))
    fair.add(QueueKey("a", priority_rank(PRIORITY_S + 1.0, 0), 3))
    fair.add(QueueKey("a", priority_rank(PRIORITY_S + 2.0, -1), 4))
    assert list(fair) == [4, 2, 1, 3]
    assert fair.last_of("a") == 3


def test_a_priority_takes_nothing_from_other_tenants() -> None:
    fair = FairQueue(FairShares())
    for number in range(1, 5):
        fair.add(QueueKey("urgent", priority_rank(float(number), -100), number), 1.0)
        fair.add(QueueKey("calm", priority_rank(float(number), 0), 10 + number), 1.0)
    assert list(fair) == [1, 11, 2, 12, 3, 13, 4, 14]


def test_who_leaves_is_forgotten_and_the_rest_keeps_its_order() -> None:
    fair = queue(FairShares(), ("a", 1.0), ("b", 1.0), ("a", 1.0), ("b", 1.0))
    for number in (1, 4, 4):
        fair.remove(number)
    fair.check_invariants()
    assert (list(fair), fair.count(), 1 in fair, len(fair)) == ([2, 3], {"a": 1, "b": 1}, False, 2)


def test_tenants_without_end_are_not_remembered() -> None:
    shares = FairShares()
    for number in range(3 * MAX_TENANTS):
        shares.serve(f"tenant {number}", 1.0)
    times = pickle.loads(pickle.dumps(shares))
    assert times.digest() == shares.digest()
    assert len(pickle.dumps(shares)) < 100 * MAX_TENANTS


def test_of_too_many_tenants_the_half_that_was_served_most_is_remembered() -> None:
    shares = FairShares(credit=10.0 * MAX_TENANTS)
    for number in range(MAX_TENANTS + 1):
        shares.serve(f"t{number}", 1.0 + number)
    half = MAX_TENANTS // 2
    assert [shares.time(f"t{MAX_TENANTS - place}") for place in (0, half - 1)] == [1.0 + MAX_TENANTS, 2.0 + half]
    assert shares.time(f"t{MAX_TENANTS - half}") == 0.0


@pytest.mark.parametrize(
    ("there", "tenant", "lets_in"),
    [
        ({"a": 9}, "a", True),
        ({"a": 10}, "a", False),
        ({"a": 10}, "b", True),
        ({"a": 10, "b": 5}, "b", False),
        ({"a": 10, "b": 4}, "b", True),
        ({"a": 10, "b": 9, "c": 1}, "c", False),
        ({"a": 10, "b": 5, "c": 4}, "c", False),
    ],
)
def test_a_flood_does_not_shut_others_out(there: dict[str, int], tenant: str, lets_in: bool) -> None:
    assert may_admit(Counter(there), tenant, 10, lambda _: 1.0) is lets_in


def test_shares_of_the_room_go_by_weight() -> None:
    weights = {"a": 1.0, "b": 4.0}
    assert may_admit(Counter(a=10, b=7), "b", 10, weights.__getitem__)
    assert not may_admit(Counter(a=10, b=8), "b", 10, weights.__getitem__)


@dataclass
class Server:
    """One server of tenants that always have more to do, and of one that keeps within its share."""

    shares: FairShares
    weights: dict[str, float]
    flood_costs: dict[str, list[float]]
    now: float = 0.0
    served: Counter[str] = field(default_factory=Counter)

    def serve(self, calm: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Serves requests of "calm", which come at these times and cost so much; when each begins and ends."""
        number, waiting, times, coming = 0, FairQueue(self.shares), {}, list(calm)
        for tenant, costs in self.flood_costs.items():
            for cost in costs:
                number += 1
                waiting.add(QueueKey(tenant, 0.0, number, self.weights[tenant]), cost)
                times[number] = cost
        calm_numbers: list[int] = []
        done: dict[int, float] = {}
        while len(done) < len(calm):
            while coming and coming[0][0] <= self.now:
                at, cost = coming.pop(0)
                number += 1
                calm_numbers.append(number)
                waiting.add(QueueKey("calm", priority_rank(at, 0), number, self.weights["calm"]), cost)
                times[number] = cost
            place = waiting.first()
            waiting.remove(place.number)
            self.shares.serve(place.tenant, times[place.number], place.weight)
            self.now += times[place.number]
            self.served[place.tenant] += 1
            if place.tenant == "calm":
                done[place.number] = self.now
        return [(done[n] - times[n], done[n]) for n in calm_numbers]


@pytest.mark.parametrize("seed", range(20))
def test_within_its_share_a_tenant_is_served_with_bounded_delay(seed: int) -> None:
    """Start-time fair queueing's bound: what is due at the tenant's own rate is over one request of each other later.

    A server of its own that is as slow as the share would have begun a request at its `expected` time.
    """
    drawn = random.Random(seed)
    print("seed", seed)
    floods = {f"flood {i}": [drawn.uniform(0.1, 2.0) for _ in range(2000)] for i in range(drawn.randint(1, 4))}
    weights = {tenant: drawn.choice([1.0, 2.0]) for tenant in floods} | {"calm": drawn.choice([0.5, 1.0, 3.0])}
    share = weights["calm"] / sum(weights.values())
    calm, at = [], 0.0
    for _ in range(60):
        at += drawn.expovariate(share / 1.5)
        calm.append((at, drawn.uniform(0.1, 2.0)))
    found = Server(FairShares(credit=0.0), weights, floods).serve(calm)
    largest, expected, before = sum(max(costs) for costs in floods.values()), 0.0, 0.0
    for (came, cost), (_, ended) in zip(calm, found, strict=True):
        expected = max(came, expected + before / share)
        assert ended <= expected + largest + cost + 1e-6
        before = cost


def test_within_its_credit_a_tenant_waits_for_what_is_being_served_only() -> None:
    """A tenth of the server's time, while two others flood: no request waits for more than the one under way."""
    floods = {"one": [1.0] * 2000, "two": [1.0] * 2000}
    calm = [(10.0 * number, 1.0) for number in range(1, 80)]
    found = Server(FairShares(), {"one": 1.0, "two": 1.0, "calm": 1.0}, floods).serve(calm)
    assert max(begun - came for (came, _), (begun, _) in zip(calm, found, strict=True)) <= 1.0


def test_the_order_of_what_waits_is_that_in_which_it_would_be_served() -> None:
    drawn = random.Random(7)
    shares = FairShares()
    wanted = [
        QueueEntry(QueueKey(drawn.choice("abc"), priority_rank(drawn.random(), 0), n), drawn.random())
        for n in range(50)
    ]
    fair = FairQueue(shares)
    for entry in wanted:
        fair.add(entry.key, entry.cost)
    foreseen, served = list(fair), []
    while len(fair):
        place = fair.first()
        served.append(place.number)
        shares.serve(place.tenant, wanted[place.number].cost)
        fair.remove(place.number)
    assert served == foreseen


def test_what_an_idle_server_could_have_done_is_forgiven_once() -> None:
    shares = FairShares()
    shares.forgive_idle_until(5.0, 2.0)
    assert shares.time("new") == 10.0
    shares.forgive_idle_until(6.0, 1.0)
    assert shares.time("new") == 11.0
    shares.forgive_idle_until(8.0, 0.0)
    shares.forgive_idle_until(9.0, 1.0)
    assert shares.time("new") == 12.0


def test_of_tenants_with_equal_times_the_next_items_ranks_count() -> None:
    shares = FairShares()
    ranks = {"a": (0.0, 3.0, 9.0), "b": (1.0, 5.0)}
    queues = [
        [QueueEntry(QueueKey(tenant, rank, number), 1.0) for number, rank in enumerate(own)]
        for tenant, own in ranks.items()
    ]
    assert [entry.key.rank for entry in shares.order(queues)] == [0.0, 1.0, 3.0, 5.0, 9.0]
    mixed = [entry for queue in queues for entry in reversed(queue)]
    assert list(shares.order_unsorted(mixed)) == list(shares.order(queues))


def test_priorities_have_bounds() -> None:
    for priority in (LEAST_PRIORITY, 0, MOST_PRIORITY):
        check_priority(priority, "priority")
    for priority in (LEAST_PRIORITY - 1, MOST_PRIORITY + 1):
        with pytest.raises(InvalidRequest, match="priority: must be in"):
            check_priority(priority, "priority")
