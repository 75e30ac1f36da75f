"""Turns of tenants: by the least cost so far, dropped with their clients, one piece in each pass of the loop."""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import random
import statistics
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import pytest

from moonpool.base import world
from moonpool.base.runtime.tenant_turns import (
    LEAST_BESIDE,
    LINGER_S,
    MEASURED_AGAIN,
    UNHURRIED,
    LoopTurns,
    TakenPlace,
    TenantPlaces,
    TenantTurns,
    Turns,
)
from tests.unit.fakes.beside import Held


async def settled() -> None:
    """All that can go on without further events has gone on."""
    for _ in range(20):
        await asyncio.sleep(0)


class Costs:
    """A processor's time, which works spend as they say."""

    def __init__(self) -> None:
        self.now = 0.0
        clock = dataclasses.replace(world.Clock(), thread_time=lambda: self.now)
        world.CURRENT.set(dataclasses.replace(world.CURRENT.get(), clock=clock))

    def work(self, done: list[str], name: str, seconds: float) -> Callable[[], str]:
        def run() -> str:
            self.now += seconds
            done.append(name)
            return name

        return run


def task(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.create_task(work)


async def test_tenants_take_turns_and_a_client_that_leaves_leaves_nothing() -> None:
    """A tenant with many works waits for its own, and what waits when its client leaves is not begun."""
    threads, done, costs = Held(), list[str](), Costs()
    turns = TenantTurns(threads)
    many = [task(turns.run("eve", costs.work(done, f"eve {number}", 1.0))) for number in range(20)]
    await settled()
    calm = task(turns.run("ann", costs.work(done, "ann", 1.0)))
    await settled()
    for waiting in many[2:]:
        waiting.cancel()
    await settled()
    assert len(turns) == 2
    for _ in range(3):
        threads.release(1)
        await settled()
    assert (done, await calm) == (["eve 0", "ann", "eve 1"], "ann")
    assert (len(turns), len(threads.waiting)) == (0, 0)


async def test_who_has_cost_least_is_next() -> None:
    """A costly work counts as many cheap ones."""
    threads, done, costs = Held(), list[str](), Costs()
    turns = TenantTurns(threads)
    works = [("eve", "large", 0.1)] * 3 + [("ann", "small", 0.01)] * 12
    running = [task(turns.run(tenant, costs.work(done, name, seconds))) for tenant, name, seconds in works]
    await settled()
    while threads.waiting:
        threads.release(1)
        await settled()
    await asyncio.gather(*running)
    first, second = [place for place, name in enumerate(done) if name == "large"][:2]
    assert done[first + 1 : second].count("small") >= 10


async def test_a_failed_work_fails_its_caller_and_costs_its_tenant() -> None:
    threads, costs, done = Held(), Costs(), list[str]()
    turns = TenantTurns(threads)

    def fail() -> None:
        costs.now += 1.0
        raise ValueError("no")

    failing = task(turns.run("ann", fail))
    await settled()
    running = [task(turns.run(tenant, costs.work(done, tenant, 0.0))) for tenant in ("ann", "eve", "bob")]
    await settled()
    threads.release(1)
    with pytest.raises(ValueError, match="no"):
        await failing
    while threads.waiting:
        threads.release(1)
        await settled()
    await asyncio.gather(*running)
    assert done == ["eve", "bob", "ann"]


async def test_costs_count_only_while_somebody_waits() -> None:
    """A tenant that was served alone keeps its place."""
    turns = Turns()
    await turns.begin("ann")
    turns.end("ann", 9.0)
    await turns.begin("eve")
    waiting = [task(turns.begin(tenant)) for tenant in ("ann", "bob")]
    await settled()
    turns.end("eve", 1.0)
    await settled()
    assert [each.done() for each in waiting] == [True, False]
    turns.end("ann", 1.0)
    await asyncio.gather(*waiting)


async def test_a_caller_that_is_cancelled_when_its_turn_comes_hands_the_turn_on() -> None:
    turns = Turns()
    await turns.begin("ann")
    second, third = task(turns.begin("bob")), task(turns.begin("eve"))
    await settled()
    turns.end("ann", 1.0)
    second.cancel()
    await settled()
    assert second.cancelled()
    assert third.done()
    turns.end("eve", 1.0)
    assert (turns.taken, len(turns)) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
async def test_drawn_callers_that_leave_lose_no_place(seed: int) -> None:
    """At most so many turns at once, and all places are free in the end."""
    draws, places, most = random.Random(seed), 1 + seed % 3, 0
    turns = Turns(places)

    async def caller(tenant: str) -> None:
        nonlocal most
        await turns.begin(tenant)
        try:
            most = max(most, turns.taken)
            for _ in range(draws.randrange(4)):
                await asyncio.sleep(0)
        finally:
            turns.end(tenant, draws.random())

    running = [task(caller(draws.choice("abc"))) for _ in range(60)]
    while not all(each.done() for each in running):
        draws.choice(running).cancel() if draws.random() < 0.3 else None
        await asyncio.sleep(0)
    assert most == places
    assert (turns.taken, len(turns)) == (0, 0)


async def test_the_loop_does_one_piece_in_a_pass() -> None:
    """Whatever a tenant has, another tenant's piece is the next one."""
    turns, passes, at = LoopTurns(), list[tuple[int, str]](), 0

    async def piece(tenant: str) -> None:
        await turns.begin(tenant)
        passes.append((at, tenant))

    running = [task(piece("eve")) for _ in range(30)]
    for at in range(200):
        if at == 10:
            running.append(task(piece("ann")))
        await asyncio.sleep(0)
    assert all(each.done() for each in running)
    numbers = [number for number, _ in passes]
    assert len(set(numbers)) == len(numbers) == 31
    (calm,) = [number for number, tenant in passes if tenant == "ann"]
    before = [tenant for number, tenant in passes if 10 <= number < calm]
    assert len(before) <= 1


async def test_places_are_each_tenants_own() -> None:
    places, order = TenantPlaces(2, 2), list[str]()

    async def holder(tenant: str, rank: int) -> TakenPlace:
        place = await places.take(tenant, rank)
        order.append(f"{tenant} {rank}")
        return place

    held = [task(holder("eve", rank)) for rank in (5, 6, 7, 8, 0)]
    await settled()
    calm = task(holder("ann", 9))
    await settled()
    assert order == ["eve 5", "eve 6", "ann 9"]
    place = await held[0]
    place.give_back(done=True)
    place.give_back(done=True)  # of no effect
    await settled()
    assert order[3:] == ["eve 0"]
    for each in (held[1], held[4], calm):
        (await each).give_back(done=False)
    await settled()
    for each in (held[2], held[3]):
        (await each).give_back(done=False)
    assert not places


@pytest.mark.parametrize(
    ("at_once", "others", "fewest", "most"),
    [
        (1, "", 4, 8),
        (20, "", 20, 40),
        (1000, "", 64, 64),
        (1000, "ann", 64, 64),
        (1, "calm", 1, 1),
        (2, "calm", 2, 3),
        (20, "calm", 20, 30),
    ],
)
async def test_places_become_as_many_as_the_services_do_at_once(
    at_once: int, others: str, fewest: int, most: int
) -> None:
    """Services of which each does one work of 1 s after the other; many more would only queue up there.

    Beside another tenant's requests, fewer works wait there.
    """
    now, free_at, places, running = 0.0, [0.0] * at_once, TenantPlaces(4, 64), list[tuple[float, int, TakenPlace]]()
    clock = dataclasses.replace(world.Clock(), monotonic=lambda: now)
    world.CURRENT.set(dataclasses.replace(world.CURRENT.get(), clock=clock))
    beside = ExitStack()
    if others:
        beside.enter_context(places.present(others))

    async def work(number: int) -> None:
        place = await places.take("ann", number)
        service = min(range(at_once), key=free_at.__getitem__)
        free_at[service] = max(free_at[service], now) + 1.0
        heapq.heappush(running, (free_at[service], number, place))

    works = [task(work(number)) for number in range(2000)]
    under_way = []
    for _ in works:
        await settled()
        under_way.append(len(running))
        now, _, place = heapq.heappop(running)
        place.give_back(done=True)
    least = LEAST_BESIDE if others == "calm" else 4
    assert under_way[0] == least
    assert fewest <= statistics.median(under_way) <= most
    assert max(under_way[:-1]) <= 64
    assert min(under_way[1024:1224]) <= least  # how long a work takes is measured again
    await asyncio.gather(*works)
    assert not places


async def test_places_are_fewer_while_another_tenant_has_requests_and_a_moment_longer() -> None:
    now, places = 0.0, TenantPlaces(4, 4)
    clock = dataclasses.replace(world.Clock(), monotonic=lambda: now)
    world.CURRENT.set(dataclasses.replace(world.CURRENT.get(), clock=clock))
    waiting = [task(places.take("eve", number)) for number in range(30)]
    over = 0

    async def held(*, ended: int) -> int:
        """End so many of the works that hold places; return how many hold some then."""
        nonlocal over
        for _ in range(ended):
            (await waiting[over]).give_back(done=True)
            over += 1
            await settled()
        await settled()
        return [each.done() for each in waiting].count(True) - over

    with places.present("eve"), places.present("eve"):
        assert await held(ended=0) == 4, "a tenant's own requests do not count"
        with places.present("ann"):
            assert await held(ended=3) == 1
            assert await held(ended=2) == 1
        assert await held(ended=1) == 1
        with places.present("bob"), places.present("bob"):
            now += 2 * LINGER_S
            assert await held(ended=1) == 1
        now += LINGER_S
        assert await held(ended=1) == 1
        now += 0.1
        assert await held(ended=1) == 4
    assert await held(ended=4) == 4
    while over < len(waiting):
        await held(ended=1)
    assert not places


async def test_places_are_forgotten_when_the_last_one_comes_to_a_caller_that_is_cancelled() -> None:
    places = TenantPlaces(1, 4)
    held = await places.take("ann", 0)
    waiting = task(places.take("ann", 1))
    await settled()
    held.give_back(done=False)
    waiting.cancel()
    await settled()
    assert waiting.cancelled()
    assert not places


async def test_works_that_were_not_done_say_nothing_of_how_long_works_take() -> None:
    now, places = 0.0, TenantPlaces(2, 8)
    clock = dataclasses.replace(world.Clock(), monotonic=lambda: now)
    world.CURRENT.set(dataclasses.replace(world.CURRENT.get(), clock=clock))
    waiting = [task(places.take("ann", number)) for number in range(60)]
    taken = 0
    for _ in range(40):
        await settled()
        (await waiting[taken]).give_back(done=False)
        taken += 1
        now += 1.0
    await settled()
    assert [each.done() for each in waiting].count(True) == taken + 2
    for each in waiting[taken:]:
        each.cancel()
    for each in waiting[taken : taken + 2]:
        each.result().give_back(done=False)
    await settled()
    assert not places


async def test_places_grow_after_so_many_works_and_are_measured_again_after_so_many() -> None:
    now, places = 0.0, TenantPlaces(2, 4)
    clock = dataclasses.replace(world.Clock(), monotonic=lambda: now)
    world.CURRENT.set(dataclasses.replace(world.CURRENT.get(), clock=clock))
    held = await places.take("ann", 0.0)  # places are known as long as one is taken

    async def work(times: int) -> None:
        nonlocal now
        for _ in range(times):
            place = await places.take("ann", 0.0)
            now += 1.0
            place.give_back(done=True)

    async def most_at_once() -> int:
        taking = [task(places.take("ann", 0.0)) for _ in range(8)]
        await settled()
        taken = [each.result() for each in taking if each.done()]
        for each in taking[len(taken) :]:
            each.cancel()
        await settled()
        for place in taken:
            place.give_back(done=False)
        return 1 + len(taken)

    await work(UNHURRIED + 1)
    assert await most_at_once() == 2
    await work(1)
    assert await most_at_once() == 3
    await work(MEASURED_AGAIN - UNHURRIED - 2)
    assert await most_at_once() == 4
    await work(1)
    assert await most_at_once() == 2
    held.give_back(done=False)
    assert not places
