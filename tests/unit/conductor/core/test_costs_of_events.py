"""What an event costs does not grow with those who wait or run elsewhere: calls of functions are counted, not time."""

import sys
from collections.abc import Callable
from types import FrameType

from moonpool.base.scheduling.fair_share import FairShares, QueueKey
from moonpool.base.scheduling.state_machine import Timers
from moonpool.conductor.core.demand import MemoryNeed
from moonpool.conductor.core.events import LoadReported
from moonpool.conductor.core.instances import LoadFacts
from moonpool.conductor.core.memory_queue import MAX_LOOKS, DecodeMemoryQueue, MemoryWaiter
from moonpool.conductor.core.request_states import TimerKey
from moonpool.conductor.core.slo_queue import (
    MAX_RETRIES_AT_ONCE,
    MAX_RETRY_PAUSE_S,
    RETRY_PAUSE_S,
    SLO_QUEUE_TIMER,
    SloQueue,
)
from moonpool.conductor.core.tenant_counts import TENANT_MEMORY_S, TenantCounts
from moonpool.conductor.core.tenant_ledger import Elsewhere, TenantLedger
from tests.unit.conductor.core.world import World

FEW, MANY = 50, 2000


def operations(work: Callable[[], object]) -> int:
    """Python functions that are entered, and generators that go on, while something is done."""
    count = 0

    def count_calls(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(count_calls)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def place(number: int, tenant: str = "ours") -> QueueKey:
    return QueueKey(tenant, float(number), number)


def slo_queue(waiting: int) -> SloQueue:
    queue = SloQueue(FairShares(), Timers(), most=2 * MANY, most_bytes=1 << 30)
    for number in range(waiting):
        queue.add(0.0, place(number), 4, 1.0, MAX_RETRY_PAUSE_S)
    return queue


def test_the_slo_queue_costs_the_same_however_many_wait_in_it() -> None:
    def turn(queue: SloQueue) -> None:
        assert queue.add(0.5, place(MANY), 4, 1.0, RETRY_PAUSE_S) == []
        assert MANY in queue.retrying(0.6)
        queue.remove(MANY)

    few, many = slo_queue(FEW), slo_queue(MANY)
    assert operations(lambda: turn(many)) <= 2 * operations(lambda: turn(few))  # places are found by halving
    full = SloQueue(FairShares(), Timers(), most=MANY, most_bytes=1 << 30)
    for number in range(MANY):
        full.add(0.0, place(number), 4, 1.0, MAX_RETRY_PAUSE_S)
    assert operations(lambda: full.add(0.0, place(MANY), 4, 1.0, MAX_RETRY_PAUSE_S)) < 2 * FEW
    full.check_invariants()


def test_all_of_the_slo_queue_retry_in_their_turn() -> None:
    timers: Timers[TimerKey] = Timers()
    queue, seen, now = SloQueue(FairShares(), timers, most=FEW, most_bytes=1 << 30), set[int](), 0.0
    for number in range(FEW):
        queue.add(0.0, place(number), 4, 1.0, MAX_RETRY_PAUSE_S)
    while now < 2 * MAX_RETRY_PAUSE_S:
        at = timers.at(SLO_QUEUE_TIMER)
        assert at is not None
        now = at
        found = queue.retrying(now)
        assert len(found) <= MAX_RETRIES_AT_ONCE
        seen |= set(found)
        queue.check_invariants()
    assert seen == set(range(FEW))


def test_draining_looks_at_the_calls_of_the_instance_alone() -> None:
    def report_of(elsewhere: int) -> int:
        world = World(prefills=1, decodes=2, total=6400)
        for _ in range(elsewhere):
            world.streaming()
        there = LoadFacts(free_blocks=6400, draining=True)
        world.join_decode("decode-9", total=6400)
        out: list[object] = []
        return operations(lambda: world.core.handle(world.now, LoadReported("decode-9", there), out))  # type: ignore[arg-type]

    assert report_of(40) <= report_of(4) + 4


def test_a_report_looks_at_a_few_of_those_who_wait_for_room() -> None:
    rooms = DecodeMemoryQueue(FairShares(), TenantLedger({}, 1.0))
    for number in range(MANY):
        rooms.add(MemoryWaiter(place(number), MemoryNeed(100, 100), since=0.0), 0.0)
    looked = 0

    def leaves(_: QueueKey) -> bool:
        nonlocal looked
        looked += 1
        return False

    assert rooms.woken("decode-0", 10, 1000, lambda need: need.longest, leaves, 1.0) == []
    assert looked == MAX_LOOKS
    assert rooms.woken("decode-0", 250, 1000, lambda need: need.longest, leaves, 1.0) == [0, 1]
    assert looked <= 2 * MAX_LOOKS + 2


def test_those_that_an_instance_is_too_small_for_use_up_no_looks() -> None:
    rooms = DecodeMemoryQueue(FairShares(), TenantLedger({}, 1.0))
    for number in range(2 * MAX_LOOKS):
        rooms.add(MemoryWaiter(place(number), MemoryNeed(100, 100), since=0.0), 0.0)
    rooms.add(MemoryWaiter(place(2 * MAX_LOOKS), MemoryNeed(2, 2), since=0.0), 0.0)
    asked: list[int] = []

    def needs(need: MemoryNeed) -> int:
        asked.append(need.longest)
        return need.longest

    assert rooms.woken("decode-0", 10, 50, needs, lambda _: False, 60.0) == [2 * MAX_LOOKS]
    assert asked == [2]
    assert rooms.woken("decode-0", 0, 0, needs, lambda _: False, 60.0) == []
    assert rooms.woken("decode-1", 110, 1000, needs, lambda _: False, 60.0) == [0]


def test_who_leaves_room_is_known_without_a_look_at_all_tenants() -> None:
    def tenant_counts(tenants: int) -> TenantCounts:
        counts = TenantCounts()
        for number in range(tenants):
            counts.came(place(number, f"tenant-{number}"))
        return counts

    few, many = tenant_counts(FEW), tenant_counts(MANY)
    flood, none = place(0, "tenant-0"), Elsewhere()
    for queue in (few, many):
        queue.came(flood)
    assert operations(lambda: many.above_share(flood, none, 0.0)) == operations(
        lambda: few.above_share(flood, none, 0.0)
    )
    assert many.above_share(flood, none, 0.0)
    assert not many.above_share(place(1, "tenant-1"), none, 0.0)


def test_a_tenant_whose_answer_runs_for_long_is_not_forgotten() -> None:
    counts = TenantCounts()
    counts.came(place(1, "calm"))
    for number in range(10):
        counts.came(place(number, "flood"))
    assert counts.above_share(place(11, "flood"), Elsewhere(), 10 * TENANT_MEMORY_S)
    counts.left("calm", 10 * TENANT_MEMORY_S)
    assert counts.above_share(place(11, "flood"), Elsewhere(), 11 * TENANT_MEMORY_S)
    assert not counts.above_share(place(11, "flood"), Elsewhere(), 11 * TENANT_MEMORY_S + 1.0)
    counts.check_invariants({"flood": 10})


def test_requests_at_other_conductors_count_for_a_share() -> None:
    counts = TenantCounts()
    counts.came(place(1, "calm"))
    counts.came(place(2, "flood"))
    assert not counts.above_share(place(3, "flood"), Elsewhere(), 0.0)
    flooded = Elsewhere(running={"flood": 5, "third": 1}, weights={"flood": 1.0, "third": 1.0})
    assert counts.above_share(place(3, "flood"), flooded, 0.0)
    assert not counts.above_share(place(3, "calm"), flooded, 0.0)
    assert TenantCounts().above_share(place(3, "flood"), flooded, 0.0), "though it has none here"
