"""Whole prompts that are computed here: their turn, their share of the steps, and what becomes of them."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from moonpool.base.scheduling.latency import decode_step_seconds
from moonpool.engine.decode.core.actions import BeginPrompt, StartRun, StoreBlock
from moonpool.engine.decode.core.events import AbortRequest, SearchRules, StreamOpened
from moonpool.engine.decode.core.request import RequestStatus
from moonpool.engine.decode.core.settings import Preemption
from moonpool.engine.scheduler.prefix_sources import KVSource, LoadBlocks, PrefixLoaded
from tests.examples import examples
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.tbt_world import STEEP, PacedWorld
from tests.unit.engine.decode.core.world import SPEEDS, World, config

QUEUED, RECOMPUTING = RequestStatus.QUEUED, RequestStatus.RECOMPUTING


def whole(world: World, start: list[int], answer: int | tuple[int, ...] = 4, **options: object) -> int:
    """A request whose prompt waits here, or is computed."""
    number = world.reserve(start, answer, whole=True, **options)  # type: ignore[arg-type]
    assert number is not None, world.refused[-1]
    world.compute(number)
    return number


def runs(world: World) -> list[StartRun]:
    return [action for action in world.actions if isinstance(action, StartRun)]


def begun(world: World) -> list[int]:
    """Requests in the order in which their prompts have begun."""
    return [action.id for action in world.actions if isinstance(action, BeginPrompt)]


def computed_by(world: World) -> dict[int, int]:
    """Prompt tokens that each request has had computed."""
    found: dict[int, int] = {}
    for run in runs(world):
        for chunk in run.chunks:
            found[chunk.id] = found.get(chunk.id, 0) + chunk.count
    return found


# --- the share of the steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", [0, 1, 4])
def test_between_two_chunks_answers_go_on_in_a_run(between: int) -> None:
    world = World(
        config(60, chunked_prefill_size=20, num_continuous_decode_steps=between, run_steps=64, ahead_steps=64)
    )
    world.go(prompt(BT, 1), 200)
    for _ in range(3):
        world.step()
    number = whole(world, prompt(100), 2)
    before = len(runs(world))
    while number in world.core.requests:
        world.step()
    steps = [(run.steps, sum(chunk.count for chunk in run.chunks)) for run in runs(world)[before:]]
    chunk_runs = [at for at, (_, tokens) in enumerate(steps) if tokens]
    assert [steps[at] for at in chunk_runs] == [(1, 20)] * 5
    for one, other in pairwise(chunk_runs):
        assert sum(count for count, _ in steps[one + 1 : other]) == between
        assert other - one == (2 if between else 1)
    world.work()
    world.assert_at_rest()
    world.assert_reruns()


def test_a_long_run_ends_when_a_prompt_comes() -> None:
    world = World(config(60, run_steps=64, ahead_steps=64, chunked_prefill_size=BT))
    first = world.go(prompt(BT, 1), 100)
    assert world.run is not None
    assert world.run.steps > 30
    whole(world, prompt(3 * BT))
    assert world.left == 1
    world.step()
    assert runs(world)[-1].chunks
    assert runs(world)[-1].batch == (first,)


def test_a_promised_time_bounds_the_chunks() -> None:
    """Then a part of each step is the prompts', none is kept for the answers alone."""
    world = PacedWorld(config(120, speeds=STEEP, chunked_prefill_size=20, num_continuous_decode_steps=5))
    slo = decode_step_seconds(STEEP, 1, 6 * BT)
    running = world.reserve(prompt(BT, 1), 4 * BT, slo=slo)
    assert running is not None
    world.arrive(running)
    world.start(running)
    number = world.reserve(prompt(2 * BT), 2, whole=True)
    assert number is not None
    world.compute(number)
    while running in world.core.requests:
        world.step()
    beside = [sum(chunk.count for chunk in run.chunks) for run in runs(world) if run.batch and run.chunks]
    assert beside
    assert max(beside) < 20
    world.work()
    world.assert_at_rest()


def test_without_answers_a_step_is_full() -> None:
    world = World(config(120, chunked_prefill_size=BT, max_num_batched_tokens=100))
    whole(world, prompt(250), 1)
    world.work()
    assert [chunk.count for run in runs(world) for chunk in run.chunks] == [100, 100, 50]


def test_scored_prompts_have_smaller_chunks_and_reuse_nothing() -> None:
    world = World(config(120, max_num_batched_tokens=100))
    for _ in range(2):
        whole(world, prompt(50), 1, reuse=False, token_cost=10)
        world.work()
    assert [chunk.count for run in runs(world) for chunk in run.chunks] == [10] * 10
    world.assert_at_rest()


# --- the order -------------------------------------------------------------------------------------------------------


def test_prompts_begin_in_the_order_of_their_arrival_and_delay() -> None:
    world = World(config(120, max_num_batched_tokens=BT))
    first = whole(world, prompt(3 * BT, 1))
    late, soon = (world.reserve(prompt(3 * BT, seed), whole=True) for seed in (2, 3))
    assert late is not None
    assert soon is not None
    world.compute(late, delay_s=1.0)
    world.compute(soon)
    assert [world.core.requests[number].status for number in (first, late, soon)] == [RECOMPUTING, QUEUED, QUEUED]
    world.work()
    assert begun(world) == [first, soon, late]
    world.assert_at_rest()
    world.assert_reruns()


def test_tenants_get_equal_parts_of_the_time_by_weight() -> None:
    world = World(config(400, max_num_batched_tokens=BT, max_num_seqs=64))
    numbers = [whole(world, prompt(2 * BT, seed), 1, tenant="a") for seed in range(20)]
    others = [whole(world, prompt(2 * BT, 50 + seed), 1, tenant="b", weight=3.0) for seed in range(20)]
    while len(begun(world)) < 21:
        world.step()
    done = computed_by(world)
    a, b = (sum(done.get(number, 0) for number in group) for group in (numbers, others))
    assert b / a == pytest.approx(3.0, rel=0.35)
    world.work()
    world.assert_at_rest()


def test_what_another_prompt_computes_is_waited_for_and_found() -> None:
    world = World(config(60, max_num_batched_tokens=20 * BT))
    blocker = whole(world, prompt(5, 9), 1)
    first = whole(world, prompt(6 * BT), 1)
    second = whole(world, prompt(6 * BT + 5), 1)
    world.step()
    assert [world.core.requests[number].status for number in (first, second)] == [RECOMPUTING, QUEUED]
    world.work()
    assert computed_by(world) == {blocker: 5, first: 6 * BT, second: 5}
    world.assert_at_rest()


def test_a_prompt_waits_for_a_slot_and_not_before_one_that_waits_longer() -> None:
    world = World(config(60, max_num_seqs=2))
    running = [world.go(prompt(BT, seed), length) for seed, length in ((1, 3), (2, 9))]
    group = world.go(prompt(BT, 3), (4, 4))
    number = whole(world, prompt(BT, 4), 2)
    while world.core.requests[number].status is QUEUED:
        assert {*running, group} & world.core.requests.keys()
        world.step()
    assert world.core.requests.get(group) is None or world.core.requests[group].status is RequestStatus.RUNNING
    world.work()
    world.assert_at_rest()


def test_a_preempted_request_goes_first() -> None:
    world = World(config(9, assumed_answer_tokens=1, preemption=Preemption.RECOMPUTE))
    numbers = [world.go(prompt(BT, seed), 5 * BT) for seed in (1, 2)]
    while not world.core.preempted.queue:
        world.step()
    number = world.reserve(prompt(BT, 3), 2, whole=True)
    if number is not None:
        world.compute(number)
        while world.core.preempted.queue:
            assert world.core.requests[number].status is QUEUED
            world.step()
    world.work()
    assert [len(world.answers[which]) for which in numbers] == [5 * BT] * 2
    world.assert_at_rest()


# --- what becomes of them --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [(), (0, 2), (None, 1)])
def test_its_blocks_go_to_the_kvstores_that_lack_them(held: tuple[int | None, ...]) -> None:
    world = World(config(60))
    world.go(prompt(2 * BT), 1)
    world.work()
    world.actions.clear()
    number = world.reserve(prompt(4 * BT + 1), 1, whole=True, stores=2)
    assert number is not None
    world.compute(number, held=held)
    world.work()
    first = [min(2, blocks) if blocks is not None else 2 for blocks in (*held, None, None)[:2]]
    stores = {(action.index, action.store) for action in world.actions if isinstance(action, StoreBlock)}
    assert stores == {(index, store) for store in (0, 1) for index in range(first[store], 4)}


def test_reports_count_promised_queued_and_begun_prompts() -> None:
    world = World(config(100, max_num_batched_tokens=BT))
    prompts = world.core.planner.prompts
    numbers = [world.reserve(prompt(4 * BT, seed), 1, whole=True) for seed in range(3)]
    requests = world.core.requests.values()
    assert prompts.tokens_left(requests) == 12 * BT
    assert prompts.drain_s(requests) == pytest.approx(12 * BT * 1e-4)
    for number in numbers:
        assert number is not None
        world.compute(number)
    world.step()
    assert prompts.tokens_left(requests) == 11 * BT
    assert world.reserve(prompt(5, 9), whole=True, max_queue_s=0.001) is None
    assert world.refused[-1].reason == "stale"
    world.work()
    assert (prompts.tokens_left(requests), prompts.drain_s(requests)) == (0, 0.0)


@pytest.mark.parametrize("status", [RequestStatus.PROMISED, QUEUED, RECOMPUTING])
@pytest.mark.parametrize("parks", [False, True])
def test_the_next_conductor_takes_it_over_or_hears_that_it_is_gone(status: RequestStatus, parks: bool) -> None:
    world = World(config(60, max_num_seqs=1, max_num_batched_tokens=BT, grace_s=1.0))
    world.post(StreamOpened(2, "other"))
    blocker = whole(world, prompt(2 * BT, 1), 1) if status is QUEUED else None
    number = world.reserve(prompt(4 * BT), 4, whole=True, conductor="conductor", resumable=True)
    assert number is not None
    if status is not RequestStatus.PROMISED:
        world.compute(number)
    assert world.core.requests[number].status is status
    world.followers.clear()
    world.close(1)
    if parks:
        world.tick(2.0)
        if world.run is not None:
            world.step()
    if status is RequestStatus.PROMISED or (status is QUEUED and parks):
        assert number in world.failed
    else:
        world.adopt(number, 2, fence=1)
        world.work()
        assert world.heard[number] == world.answers[number]
        assert len(world.answers[number]) == 4
    world.work()
    assert blocker is None or blocker not in world.core.requests
    world.assert_at_rest()
    world.assert_reruns()


# --- prefixes from elsewhere ------------------------------------------------------------------------------------------

STORE, OTHER, PEER = KVSource("store 1", 3), KVSource("other 1", 2), KVSource("peer 1", 3, peer=True)
LOADED = {"speeds": replace(SPEEDS, load_bytes_per_s=1e9, peer_bytes_per_s=1e9)}


def loading(world: World, start: list[int], *sources: KVSource, **options: object) -> int:
    number = world.reserve(start, 2, whole=True, **options)  # type: ignore[arg-type]
    assert number is not None
    world.compute(number, sources=sources)
    return number


def begin_of(world: World, number: int) -> BeginPrompt:
    [found] = [action for action in world.actions if isinstance(action, BeginPrompt) and action.id == number]
    return found


def loads(world: World) -> dict[int, LoadBlocks]:
    return {io: action for io, action in world.ios.items() if isinstance(action, LoadBlocks)}


def test_a_prefix_is_loaded_whole_and_the_rest_is_computed() -> None:
    world = World(config(60, **LOADED))
    number = loading(world, prompt(4 * BT + 5), STORE, stores=1)
    [(io, load)] = loads(world).items()
    assert (load.source, load.first, len(load.blocks)) == (0, 0, 3)
    assert (world.core.requests[number].status, world.run) == (RequestStatus.LOADING, None)
    world.end_io(io)
    assert chunks_of(world, number) == [(48, 21)]
    told = begin_of(world, number)
    assert (told.cached_tokens, told.loaded_tokens, told.misses) == (0, 48, ())
    assert told.loads == (PrefixLoaded(0, 3, 1e-3),)
    world.work()
    assert {action.index for action in world.actions if isinstance(action, StoreBlock)} == {3}
    again = world.reserve(prompt(4 * BT + 5), whole=True)
    assert again is not None
    assert world.held[again] == 4
    world.compute(again)
    world.work()
    world.assert_at_rest()
    world.assert_reruns()


def chunks_of(world: World, number: int) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.count) for run in runs(world) for chunk in run.chunks if chunk.id == number]


@pytest.mark.parametrize(
    ("came", "failed", "start", "missed"),
    [(1, False, 16, 1), (0, False, 0, 0), (0, True, 0, None), (2, True, 32, None)],
)
def test_what_does_not_come_is_computed(came: int, failed: bool, start: int, missed: int | None) -> None:
    world = World(config(60, **LOADED))
    number = loading(world, prompt(4 * BT + 5), STORE)
    world.end_io(*loads(world), blocks=came, failed=failed)
    assert chunks_of(world, number) == [(start, 4 * BT + 5 - start)]
    assert [miss.block for miss in begin_of(world, number).misses] == ([] if missed is None else [missed])
    world.work()
    world.assert_at_rest()
    world.assert_reruns()


def test_the_next_source_is_asked_and_one_that_failed_is_left_alone() -> None:
    world = World(config(90, **LOADED))
    number = loading(world, prompt(4 * BT + 5), STORE, OTHER)
    world.end_io(*loads(world), blocks=0, failed=True)
    [(io, load)] = loads(world).items()
    assert (load.source, len(load.blocks)) == (1, 2)
    other = loading(world, prompt(4 * BT + 5, 3), STORE, PEER)
    assert loads(world).pop(max(world.ios)).source == 1
    world.end_io(io, blocks=0)
    assert [(miss.source, miss.block) for miss in begin_of(world, number).misses] == [(1, 0)]
    world.end_io(*loads(world), blocks=1)
    assert begin_of(world, other).misses == (), "a peer may lend fewer"
    world.work()
    world.assert_at_rest()


def test_what_is_computed_sooner_is_not_loaded() -> None:
    slow = replace(SPEEDS, load_bytes_per_s=1.0)
    world = World(config(60, speeds=slow))
    number = loading(world, prompt(4 * BT + 5), STORE)
    assert not loads(world)
    assert chunks_of(world, number) == [(0, 4 * BT + 5)]
    world.work()
    world.assert_at_rest()


def test_others_are_computed_meanwhile() -> None:
    world = World(config(60, **LOADED))
    slow = loading(world, prompt(4 * BT + 5), STORE)
    quick = whole(world, prompt(2 * BT, 1), 2)
    while quick in world.core.requests:
        world.step()
    world.end_io(*loads(world))
    world.work()
    assert slow not in world.core.requests
    world.assert_at_rest()


@pytest.mark.parametrize("parks", [False, True])
def test_one_that_ends_while_it_loads_gives_its_blocks_back_when_the_load_is_over(parks: bool) -> None:
    world = World(config(60, **LOADED, grace_s=1.0))
    number = loading(world, prompt(4 * BT + 5), STORE, resumable=True, conductor="conductor")
    [io] = loads(world)
    if parks:
        world.followers.clear()
        world.close(1)
        world.tick(2.0)
        assert not world.cancelled
    else:
        world.post(AbortRequest(number, "cancelled"))
        assert world.cancelled == {io}
    assert world.core.blocks.num_used == 5
    world.end_io(io, ok=False)
    assert world.core.blocks.num_used == 0
    world.work()
    world.assert_at_rest()


WALKS = ((0, 0, False, 0), (1, 0, False, 0), (0, 0, False, 9), (1, 1, False, 0), (0, 2, False, 0), (1, 1, True, 0))


@pytest.mark.parametrize(
    ("way", "every", "window_blocks", "states", "drafts"),
    [
        pytest.param(way, *walk, marks=pytest.mark.slow if (row + column) % 3 else ())
        for row, walk in enumerate(WALKS)
        for column, way in enumerate(Preemption)
    ],
)
def test_random_walks(way: Preemption, every: int, window_blocks: int, states: bool, drafts: int) -> None:
    """Prompts that come and whole ones, single answers, groups and beams, cancelled at any time, in a crowded pool."""
    rng = random.Random(f"whole {way} {every} {window_blocks} {states}")
    crowded = {"preemption": way, "swap_blocks": 40, "chunked_prefill_size": 24, "assumed_answer_tokens": 20}
    crowded |= {"draft_tokens": drafts, "max_num_batched_tokens": 50}
    if window_blocks:
        slots = 4 * (window_blocks + 2) + 40 // BT
        crowded |= {"window_blocks": window_blocks, "window_slots": slots, "recurrent": states, "states_alone": states}
    runs = {"preempt_every": 1} if every else {"run_steps": BT + 2, "ahead_steps": BT + 2}
    world = World(config(24, **crowded, **runs, **LOADED))
    left, cancelled, loaded = examples(75), set[int](), 0
    while left or world.core.requests:
        promised = [n for n, request in world.core.requests.items() if request.status is RequestStatus.PROMISED]
        draw = rng.random()
        if left and draw < 0.2:
            start = prompt(rng.choice((rng.randint(1, 4 * BT), rng.randint(1, 4) * BT)), rng.randrange(4))
            kind, search = rng.random(), None
            answers: int | tuple[int, ...] = rng.randint(1, 12 * BT)
            if kind < 0.3:
                answers = tuple(rng.randint(1, 3 * BT) for _ in range(rng.randint(2, 3)))
            elif kind < 0.4:
                answers, search = (rng.randint(1, 2 * BT),) * rng.randint(1, 3), SearchRules(1.0, "never")
            options = {"whole": rng.random() < 0.8, "reuse": rng.random() < 0.9, "stores": 1, "search": search}
            total = 0 if search else 17 * BT if isinstance(answers, int) else 8 * BT
            left -= world.reserve(start, answers, total=total, **options) is not None  # type: ignore[arg-type]
        elif promised and draw < 0.45:
            number = rng.choice(promised)
            if world.asked[number].computes_prompt:
                known = rng.choice((0, 0, 3, BT + 3)) if world.asked[number].search is None else 0
                sources = tuple(source for source in (STORE, OTHER, PEER) if rng.random() < 0.3)
                world.compute(number, known=known, delay_s=rng.choice((0.0, 1.0)), sources=sources)
            else:
                world.arrive(number)
                world.start(number)
        elif world.core.requests and rng.random() < 0.002:
            number = rng.choice(sorted(world.core.requests))
            if world.core.requests[number].status is not RequestStatus.FINISHING:
                cancelled.add(number)
                world.post(AbortRequest(number, "cancelled"))
        elif world.ios and draw < 0.7:
            io = rng.choice(sorted(world.ios))
            load, part = world.ios[io], rng.random() < 0.5
            short = rng.randrange(len(load.blocks)) if isinstance(load, LoadBlocks) and part else None
            loaded += isinstance(load, LoadBlocks)
            world.end_io(io, blocks=short, failed=short is not None and rng.random() < 0.3)
        elif world.run is not None:
            if rng.random() < 0.05:
                world.abort()
            else:
                world.step()
        assert world.core.planner.steps < 40_000
    while world.ios:
        world.end_io(min(world.ios))
    world.assert_at_rest()
    world.assert_reruns()
    assert set(world.failed) == cancelled
    for number, asked in world.asked.items():
        if number in cancelled or number not in world.known or asked.search is not None:
            continue
        for other in range(number, number + asked.request.width):
            assert world.heard[other] == world.answers[other]
    planner, preempted = world.core.planner, world.core.preempted
    print(f"{way}: {planner.starts.begun} prompts, {preempted.preemptions} preemptions, {len(cancelled)} cancelled")
    assert planner.starts.begun > 10
    assert loaded > 2
    assert preempted.preemptions > 0
