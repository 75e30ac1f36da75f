"""Long random walks over a crowded pool: every answer comes, whatever is preempted, and is the right one."""

import random

import pytest

from moonpool.base.scheduling.latency import decode_step_seconds
from moonpool.engine.decode.core.actions import FenceConductor, RequestAdopted, RequestParked
from moonpool.engine.decode.core.events import SearchRules, StreamOpened
from moonpool.engine.decode.core.request import RequestStatus
from moonpool.engine.decode.core.settings import Preemption
from tests.examples import examples
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.tbt_world import STEEP, PacedWorld
from tests.unit.engine.decode.core.world import World, config


def advance(world: World, rng: random.Random) -> None:
    """Something that can happen next, happens."""
    numbers = [
        n
        for n, request in world.core.requests.items()
        if request.status in (RequestStatus.PROMISED, RequestStatus.RECEIVED)
    ]
    if numbers and rng.random() < 0.3:
        number = rng.choice(numbers)
        if world.core.requests[number].status is RequestStatus.PROMISED:
            world.arrive(number)
        else:
            world.start(number)
    elif world.ios and rng.random() < 0.5:
        world.end_io(rng.choice(sorted(world.ios)))
    elif world.run is not None:
        world.step()


WALKS = (
    (0, 0, False, 0),
    (1, 0, False, 0),
    (1, 1, False, 0),
    (0, 0, False, 9),
    (3, 1, False, 9),
    (0, 2, False, 0),
    (1, 1, True, 0),
)


@pytest.mark.parametrize(
    ("way", "every", "window_blocks", "states", "drafts"),
    [
        pytest.param(way, *walk, marks=pytest.mark.slow if (row + column) % 2 else ())
        for row, walk in enumerate(WALKS)
        for column, way in enumerate(Preemption)
    ],
)
@pytest.mark.parametrize("groups", [pytest.param(False, marks=pytest.mark.slow), True])
def test_overcommitted(
    way: Preemption, every: int, groups: bool, window_blocks: int, states: bool, drafts: int
) -> None:
    """Answers three times longer than expected, in a pool for a few of them, with few window blocks."""
    rng = random.Random(f"{way} {every}")
    crowded = {"preemption": way, "swap_blocks": 40, "chunked_prefill_size": 40, "assumed_answer_tokens": 20}
    crowded |= {"draft_tokens": drafts}
    if window_blocks:
        slots = window_blocks + 2 + 40 // BT if not groups else 4 * (window_blocks + 2) + 40 // BT
        crowded |= {"window_blocks": window_blocks, "window_slots": slots, "recurrent": states, "states_alone": states}
    runs = {"preempt_every": every} if every else {"run_steps": BT + 2, "ahead_steps": BT + 2}
    world = World(config(24, **crowded, **runs))
    left = count = (5 if every else 15) if groups else (6 if every else 20)
    searches = 0
    while left or world.core.requests:
        if left and rng.random() < 0.2:
            total, start = rng.randint(2, 20 * BT), prompt(rng.randint(1, 3 * BT), rng.randrange(4))
            number = world.reserve(start, total, total=23 * BT, stores=1, priority=left % 3 - 1)
            left -= number is not None
        if left and groups and rng.random() < 0.1:
            answers = tuple(rng.randint(1, 4 * BT) for _ in range(rng.randint(2, 4)))
            start = prompt(rng.randint(1, 2 * BT), rng.randrange(4))
            if world.reserve(start, answers, total=6 * BT, stores=1) is not None:
                left -= 1
                count += len(answers) - 1
        if left and groups and (not searches or rng.random() < 0.1):
            beams = (rng.randint(1, 3 * BT),) * rng.randint(1, 3)
            start, rules = prompt(rng.randint(1, 2 * BT), rng.randrange(4)), SearchRules(1.0, "never")
            if world.reserve(start, beams, stores=1, search=rules) is not None:
                left -= 1
                count -= 1
                searches += 1
        advance(world, rng)
        assert world.core.planner.steps < 40_000
    while world.ios:
        world.end_io(min(world.ios))
    world.assert_at_rest()
    world.assert_reruns()
    assert not world.failed
    assert len(world.answers) == count
    assert len(world.searched) == searches
    assert (searches > 0) == groups
    planner, preempted = world.core.planner, world.core.preempted
    assert (drafts > 0) == (planner.accepted_tokens > 0) == (planner.drafted_tokens > planner.accepted_tokens)
    print(f"{way}: {world.core.planner.steps} steps, {preempted.preemptions} preemptions, {preempted.swaps} swaps")
    assert preempted.preemptions >= (3 if groups or window_blocks else 10)
    assert (preempted.swaps > 0) == (way in (Preemption.SWAP, Preemption.AUTO))


@pytest.mark.parametrize("way", Preemption)
def test_conductors_come_and_go(way: Preemption) -> None:
    """Each is lost after a while; the next one adopts what runs, what has parked and what has ended, now or later."""
    rng = random.Random(f"conductors {way}")
    world = World(
        config(
            24,
            preemption=way,
            swap_blocks=40,
            chunked_prefill_size=40,
            assumed_answer_tokens=20,
            grace_s=1.0,
            log_ttl_s=1e6,
        )
    )
    stream, left, fence = 1, 10, 0
    while left or any(world.heard[number] != world.answers[number] for number in world.heard) or world.core.requests:
        draw = rng.random()
        if left and draw < 0.1:
            length, total = rng.randint(1, 3 * BT), rng.randint(2, 20 * BT)
            left -= _go(world, prompt(length, rng.randrange(4)), total, stream)
        elif draw < 0.13:
            world.close(stream)
            stream += 1
            world.post(StreamOpened(stream, f"conductor {stream}"))
        elif draw < 0.2:
            world.tick(0.4)
        elif draw < 0.35 and world.heard:
            fence += 1
            world.adopt(rng.choice(sorted(world.heard)), stream, fence)
        elif draw > 0.4:
            advance(world, rng)
        assert world.core.planner.steps < 40_000
    while world.ios:
        world.end_io(min(world.ios))
    world.assert_at_rest()
    world.assert_reruns()
    assert (world.failed, world.lost) == ({}, [])
    assert len(world.answers) == 10
    parked, adopted, fenced = (
        [action for action in world.actions if isinstance(action, kind)]
        for kind in (RequestParked, RequestAdopted, FenceConductor)
    )
    print(f"{way}: {len(parked)} parked, {len(adopted)} adopted, {len(fenced)} fenced")
    assert min(len(parked), len(adopted), len(fenced)) > 10


def _go(world: World, tokens: list[int], answer: int, stream: int) -> bool:
    """Starts a request, if there is room."""
    who = f"conductor {stream}" if stream > 1 else "conductor"
    number = world.reserve(tokens, answer, total=23 * BT, conductor=who, stores=1, resumable=True)
    if number is not None:
        world.arrive(number)
        world.start(number, stream)
    return number is not None


@pytest.mark.parametrize("runs", [0, 2 * BT])
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 1 else ()) for seed in range(6)])
def test_promised_times_hold(seed: int, runs: int) -> None:
    """Requests with promises and without, and prompts that are computed beside them; `PacedWorld` looks at each run."""
    rng = random.Random(f"promises {seed} {runs}")
    ahead = {"run_steps": runs, "ahead_steps": runs} if runs else {}
    world = PacedWorld(config(120, speeds=STEEP, chunked_prefill_size=20, assumed_answer_tokens=2 * BT, **ahead))
    asked, count = 0, examples(60)
    while asked < count or world.core.requests:
        if asked < count and rng.random() < 0.1:
            asked += 1
            sequences, tokens = rng.randint(1, 3), rng.randint(2 * BT, 12 * BT)
            slo = rng.choice((0.0, decode_step_seconds(STEEP, sequences, tokens)))
            number = world.reserve(prompt(rng.randint(1, 3 * BT), asked), rng.randint(1, 12 * BT), slo=slo)
            if number is not None and rng.random() < 0.3:
                world.compute(number)
        advance(world, rng)
        assert world.core.planner.steps < 10_000
    world.assert_at_rest()
    world.assert_reruns()
    assert set(world.failed.values()) <= {"the prompt cannot be computed here now"}
    assert len(world.answers) == asked - len(world.refused)
    print(f"seed {seed}: {world.core.planner.steps} steps, {len(world.refused)} refused, {len(world.failed)} failed")


TENANTS = {"calm": 1.0, "heavy": 3.0, "light": 0.25}


@pytest.mark.parametrize("way", Preemption)
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 0 else ()) for seed in range(6)])
def test_no_tenant_starves_whose_requests_are_preempted(seed: int, way: Preemption) -> None:
    """A stream of small requests and of groups that need every place; `PacedWorld` asserts the bound at each event."""
    rng = random.Random(f"starving {seed} {way}")
    crowded = {
        "preemption": way,
        "swap_blocks": 40,
        "chunked_prefill_size": 60,
        "assumed_answer_tokens": 8,
        "max_num_seqs": 6,
    }
    world = PacedWorld(config(40, **crowded, watermark_blocks=1, patience_steps=10, grant_steps=10))
    while world.core.planner.steps < 300 or world.core.requests:
        if world.core.planner.steps < 300 and len(world.core.requests) < 25 and rng.random() < 0.5:
            tenant, width = rng.choice(list(TENANTS)), rng.choice([1, 1, 1, 2, 6])
            most = (10 if width == 1 else 3) * BT
            start = prompt(rng.randint(1, 3 * BT), rng.randrange(1000))
            answers, total = (rng.randint(2, most),) * width, len(start) + most + 2 * BT * (width == 1)
            number = world.reserve(start, answers, total=total, tenant=tenant, weight=TENANTS[tenant])
            if number is not None:
                world.arrive(number)
                world.start(number)
        while world.ios:
            world.end_io(rng.choice(sorted(world.ios)))
        if world.run is not None:
            world.step()
        assert world.core.planner.steps < 4_000
    while world.ios:
        world.end_io(min(world.ios))
    world.assert_at_rest()
    world.assert_reruns()
    print(f"{way}, seed {seed}: the longest of {world.core.preempted.preemptions} waits: {world.waits.longest} steps")
