"""Chunk plans, exactly: which tokens of which requests each step computes."""

from dataclasses import replace

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.scheduling.latency import Speeds, prefill_seconds
from moonpool.engine.prefill.core import actions, events
from moonpool.engine.prefill.core.scheduler import PrefillScheduler
from moonpool.engine.scheduler.prefix_sources import KVSource, LoadBlocks, LoadEnded, PrefixMiss
from tests.unit.engine.prefill.core.world import BT, SETTINGS, SPEEDS, Client, World, staged

Span = tuple[int, int, int]


def make_world(*, stages: int = 1, max_num_batched_tokens: int = 2 * BT, blocks: int = 16) -> World:
    # Without a measured base, a pipeline's steps are as large as allowed.
    speeds = SPEEDS if stages == 1 else replace(SPEEDS, prefill_base_s=0.0)
    return World(staged(stages, max_num_batched_tokens=max_num_batched_tokens, num_blocks=blocks), speeds)


def spans(world: World, io: int) -> list[Span]:
    return [(chunk.id, chunk.start, chunk.end) for chunk in world.steps[io].order.chunks]


def run(world: World) -> list[list[Span]]:
    """Runs all steps to the end; returns their spans."""
    steps = []
    while world.steps:
        io = min(world.steps)
        steps.append(spans(world, io))
        world.run_step(io)
    return steps


def loads(world: World) -> list[LoadBlocks]:
    return [action for action in world.ios.values() if isinstance(action, LoadBlocks)]


def test_chunks_end_on_block_borders_and_steps_are_packed() -> None:
    world = make_world(max_num_batched_tokens=40)
    world.arrive(50)
    world.arrive(10, 1)
    world.arrive(100, 2)
    # 40 tokens hold two blocks; the 12 left in the second step are no chunk of 3; its end need not be on a border.
    assert run(world) == [[(1, 0, 32)], [(1, 32, 50), (2, 0, 10)], [(3, 0, 32)], [(3, 32, 64)], [(3, 64, 100)]]
    assert world.core.state.manager.num_used == 0
    assert world.core.state.manager.num_cached == 3 + 0 + 6


def test_a_prompt_whose_tokens_take_long_has_short_chunks_and_pays_for_them() -> None:
    """Other tenants' prompts come in between, and no step takes longer than with other prompts."""
    world = make_world(max_num_batched_tokens=320, blocks=64)
    world.arrive(320, 1, tenant="ann", token_cost=10)
    world.arrive(320, 2, tenant="bob")
    assert run(world) == [
        [(1, 0, 32)],
        [(2, 0, 320)],
        *([(1, start, start + 32)] for start in range(32, 320, 32)),
    ]
    few = make_world(max_num_batched_tokens=80)
    few.arrive(40, 3, token_cost=10)
    assert run(few) == [[(1, 0, 16)], [(1, 16, 32)], [(1, 32, 40)]], "a block at least"


def test_what_a_step_says() -> None:
    world = make_world()
    world.arrive(40)
    (order,) = [action for action in world.done if isinstance(action, actions.RunStep)]
    assert order == actions.RunStep(1, (actions.ChunkOrder(1, 0, 32, (0, 1), last=False),), gated=False)
    world.run_step(1)
    assert world.core.state.manager.keys() == list(world.clients[1].arrive.request.keys)
    assert world.steps[2].order.chunks == (actions.ChunkOrder(1, 32, 40, (0, 1, 2), last=True),)
    world.now = 3.0
    world.run_step(2)
    assert world.done[-2:] == [
        actions.ReportFirstToken(1, 0, 0, 40, 0.0, 3.0, ()),
        actions.EndRequest(1, actions.PrefillOutcome.DONE),
    ]


def test_the_first_token_is_told_before_the_step_is_over() -> None:
    """Once; the request goes on when the step's KV is in the pool."""
    world = make_world()
    world.arrive(20)
    [io] = world.steps
    while world.can_compute(io):
        world.compute_layer(io)
    world.now = 2.0
    assert world.sample(io) == [actions.ReportFirstToken(1, 0, 0, 20, 0.0, 2.0, ())]
    assert world.sample(io) == []
    world.now = 3.0
    world.end_step(io)
    assert world.done[-1] == actions.EndRequest(1, actions.PrefillOutcome.DONE)
    assert [type(action) for action in world.done].count(actions.ReportFirstToken) == 1


def test_tokens_of_a_step_that_goes_on_with_a_prompt_tell_nothing() -> None:
    world = make_world()
    world.arrive(40)
    assert world.post(events.TokensSampled(1)) == []
    assert world.post(events.TokensSampled(7)) == [], "no such step"


@pytest.mark.parametrize("tokens", [BT - 1, BT, BT + 1, 3 * BT - 1, 3 * BT, 3 * BT + 1])
def test_a_cached_prefix_is_not_computed_but_the_last_token_is(tokens: int) -> None:
    """Of a prompt of full blocks that are all there, a step computes one token and writes nothing."""
    world = make_world()
    world.arrive(tokens)
    run(world)
    world.arrive(tokens, held=0)
    full, rest = divmod(tokens, BT)
    start = full * BT - (not rest)
    chunk = actions.ChunkOrder(2, start, tokens, world.steps[max(world.steps)].order.chunks[0].blocks, True, not rest)
    assert world.steps[max(world.steps)].order.chunks == (chunk,)
    assert len(set(chunk.blocks)) == full + (rest > 0)
    assert world.core.state.manager.num_used == len(chunk.blocks)
    world.settle()
    told = world.clients[2].token
    assert told is not None
    assert (told.cached_tokens, told.computed_tokens) == (start, tokens - start)
    assert world.core.state.manager.num_cached == full


def test_two_full_hits_share_a_step() -> None:
    """Neither waits for the other's block: none is made."""
    world = make_world()
    world.arrive(2 * BT)
    world.arrive(1, 1)
    world.run_step(1)
    for tokens in (2 * BT, 2 * BT, BT + 3):
        world.arrive(tokens)
    assert run(world) == [[(2, 0, 1)], [(3, 31, 32), (4, 31, 32), (5, 16, 19)]]


def test_a_recurrent_state_is_never_gone_back_from() -> None:
    """A prompt of full blocks that are all there computes the last one again."""
    world = World(staged(1, max_num_batched_tokens=2 * BT, num_blocks=16, recurrent=True))
    world.arrive(2 * BT)
    world.run_step(1)
    world.arrive(2 * BT)
    world.arrive(2 * BT + 1)
    assert run(world) == [[(2, 16, 32)], [(3, 32, 33)]]


def test_a_prompt_becomes_a_full_hit_while_it_waits() -> None:
    """What computes its last block is one step ahead; that block is found when it is done."""
    world = make_world(stages=2, max_num_batched_tokens=BT)
    world.arrive(2 * BT)
    world.run_step(1)
    world.arrive(2 * BT)
    assert run(world) == [[(1, 16, 32)], [(2, 31, 32)]]


def test_blocks_computed_meanwhile_are_matched_again() -> None:
    world = make_world()
    world.arrive(40)
    world.arrive(60)
    assert world.core.state.requests[2].prefix.cached == 0
    assert run(world) == [[(1, 0, 32)], [(1, 32, 40), (2, 32, 48)], [(2, 48, 60)]]
    told = world.clients[2].token
    assert told is not None
    assert (told.cached_tokens, told.computed_tokens) == (32, 28)


def test_nothing_is_computed_twice_at_once() -> None:
    """A prompt that begins like one in flight waits for it; one that differs goes first."""
    world = make_world(stages=2, max_num_batched_tokens=4 * BT)
    world.arrive(4 * BT)
    world.arrive(5 * BT)
    world.arrive(10, 1)
    assert [spans(world, io) for io in world.steps] == [[(1, 0, 64)], [(3, 0, 10)]]
    assert run(world)[2:] == [[(2, 64, 80)]]


def test_a_prompt_waits_for_blocks_and_keeps_its_turn() -> None:
    world = make_world(blocks=4)
    for tokens in (3 * BT - 1, 2 * BT - 1, 1):
        world.arrive(tokens, len(world.clients))
    assert (len(world.core.state.waiting), len(world.core.state.started), world.core.queued_tokens) == (
        2,
        1,
        47 + 31 + 1,
    )
    assert run(world) == [[(1, 0, 32)], [(1, 32, 47)], [(2, 0, 31), (3, 0, 1)]]


def test_requests_are_not_started_far_ahead() -> None:
    world = make_world(max_num_batched_tokens=BT)
    for family in range(3):
        world.arrive(2 * BT, family)
    assert list(world.core.state.started) == [1, 2]  # two steps of work, and what the first step leaves
    world.run_step(1)
    assert list(world.core.state.started) == [1, 2]


@pytest.mark.parametrize(("load_s", "at_once"), [(0.7, False), (0.8, True)])
def test_a_request_with_a_load_starts_as_much_sooner_as_the_load_takes(load_s: float, at_once: bool) -> None:
    """Seven blocks are left before the request: three more than two steps have, which take 0.75 s."""
    speeds = Speeds(prefill_per_token_s=0.25 / BT, load_bytes_per_s=6 * 3 * SETTINGS.slice_bytes / load_s)
    world = World(staged(1, max_num_batched_tokens=2 * BT, num_blocks=32), speeds)
    world.arrive(9 * BT)
    world.arrive(6 * BT + 1, 1, sources=(KVSource("store", 6),))
    assert bool(loads(world)) is at_once
    world.run_step(min(world.steps))  # five are left
    assert len(loads(world)) == 1


def test_what_is_refused() -> None:
    world = World(staged(1, num_blocks=2, max_queue=2))
    world.arrive(33)
    world.arrive(32)
    world.arrive(1, 1)
    world.arrive(1, 2)
    world.post(events.Drain())
    world.arrive(1, 3)
    refused = [action for action in world.done if isinstance(action, actions.RefuseRequest)]
    assert [(action.id, action.why) for action in refused] == [
        (1, actions.RefusalReason.TOO_LONG),
        (4, actions.RefusalReason.QUEUE_FULL),
        (5, actions.RefusalReason.DRAINING),
    ]
    assert refused[1].retry_after_s >= 0.1
    with pytest.raises(ConfigError, match="at least one block"):
        PrefillScheduler(staged(1, max_num_batched_tokens=BT - 1), Speeds())


def test_what_finds_a_longer_queue_than_it_may_is_not_taken_and_leaves_nothing() -> None:
    world = make_world()
    world.arrive(40)
    drain_s = world.core.drain_seconds()
    world.arrive(16, 1, max_queue_s=drain_s / 2)
    world.arrive(16, 1, max_queue_s=drain_s)
    told = [action for action in world.done if isinstance(action, actions.RefuseStaleRequest | actions.AcceptRequest)]
    assert told[1:] == [actions.RefuseStaleRequest(2, drain_s, taken=1), actions.AcceptRequest(3, drain_s)]
    assert list(world.core.state.requests) == [1, 3]


def test_two_stages_take_three_steps_of_one_prompt() -> None:
    """The third step waits at the first stage."""
    world = make_world(stages=2)
    world.arrive(112)
    assert [spans(world, io) for io in world.steps] == [[(1, 0, 32)], [(1, 32, 64)], [(1, 64, 96)]]
    assert list(world.steps) == [1, 2, 3]
    world.run_step(1)
    assert spans(world, 4) == [(1, 96, 112)]
    assert run(world)
    assert world.clients[1].end is not None


def test_a_prompt_alone_in_a_pipeline_is_divided_and_one_in_company_is_not() -> None:
    speeds = Speeds(prefill_base_s=0.01, prefill_per_token_s=0.01 / BT)
    alone = World(staged(2, num_blocks=100, max_num_batched_tokens=16 * BT), speeds)
    alone.arrive(16 * BT)
    # A step's fixed time is that of a block, so four steps of four blocks are the best.
    steps = [[(1, 0, 4 * BT)], [(1, 4 * BT, 8 * BT)], [(1, 8 * BT, 12 * BT)]]
    assert [spans(alone, io) for io in alone.steps] == steps
    alone.arrive(16 * BT, 1)
    alone.run_step(1)
    assert spans(alone, 4) == [(1, 12 * BT, 16 * BT), (2, 0, 12 * BT)], "others fill the pipeline now"


def test_a_step_that_the_engine_gives_up_ends_its_requests() -> None:
    world = make_world(stages=2)
    world.arrive(80)
    world.end_step(1, aborted=True)
    client = world.clients[1]
    assert client.end == actions.EndRequest(1, actions.PrefillOutcome.STEP_GIVEN_UP)
    assert world.steps[2].aborted, "nothing of the second step counts"
    assert world.core.state.manager.num_used == 5, "it still writes"
    run(world)
    world.check_rest()


def test_leaving_keeps_the_blocks_until_the_steps_are_over() -> None:
    world = make_world(stages=2)
    world.arrive(80)
    world.arrive(10, 1)
    world.post(events.CancelPrefill(1))
    assert world.clients[1].end == actions.EndRequest(1, actions.PrefillOutcome.LEFT)
    assert world.core.state.manager.num_used == 6
    world.run_step(1)
    assert world.core.state.manager.num_used == 6
    world.run_step(2)
    assert world.core.state.manager.num_used == 6
    world.run_step(3)
    assert world.core.state.manager.num_used == 1
    run(world)
    world.check_rest()


def loading(world: World, tokens: int, blocks: int, family: int = 0) -> tuple[Client, LoadBlocks]:
    client = world.arrive(tokens, family, sources=(KVSource("store", blocks),))
    return client, loads(world)[-1]


def test_a_loading_request_shares_a_step_whose_gate_is_the_least_of_its_requests() -> None:
    """Before its first layer has come, others go without it; then it joins them."""
    world = make_world(max_num_batched_tokens=4 * BT)
    world.arrive(4 * BT, 9)
    _, first = loading(world, 60, 2)
    _, second = loading(world, 60, 3, 1)
    world.arrive(4, 2)
    world.load_layer(first.io)
    world.load_layer(second.io)
    world.load_layer(second.io)
    assert not world.steps[1].order.gated
    world.run_step(1)
    (step,) = world.steps
    assert spans(world, step) == [(2, 32, 60), (3, 48, 60), (4, 0, 4)]
    assert world.steps[step].opened == 0
    world.load_layer(first.io)
    assert world.steps[step].opened == 1
    world.load_all(second.io)
    assert world.steps[step].opened == 1
    world.load_all(first.io)
    assert world.steps[step].opened == 2
    run(world)
    world.check_rest()
    told = world.clients[2].token
    assert told is not None
    assert (told.loaded_tokens, told.computed_tokens) == (32, 28)


def test_nothing_is_built_on_a_gated_chunk_before_it_is_done() -> None:
    world = make_world(stages=3)
    _, load = loading(world, 100, 2)
    world.load_layer(load.io)
    assert [spans(world, io) for io in world.steps] == [[(1, 32, 64)]]
    world.load_all(load.io)
    assert len(world.steps) == 1
    assert run(world) == [[(1, 32, 64)], [(1, 64, 96)], [(1, 96, 100)]]


@pytest.mark.parametrize("busy", [False, True])
def test_a_load_of_the_whole_prompt_leaves_its_last_token(busy: bool) -> None:
    """Followed layer by layer, or there before the engine is free: nothing is written."""
    world = make_world()
    if busy:
        world.arrive(1, 1)
    client, load = loading(world, 3 * BT, 3)
    world.load_all(load.io)
    if busy:
        world.run_step(1)
    (order,) = [step.order for step in world.steps.values()]
    assert [(chunk.start, chunk.end, chunk.full_hit) for chunk in order.chunks] == [(47, 48, True)]
    assert order.gated != busy
    assert run(world) == [[(1 + busy, 47, 48)]]
    assert client.token is not None
    assert (client.token.loaded_tokens, client.token.computed_tokens) == (47, 1)
    assert world.core.state.manager.keys() == list(client.arrive.request.keys)


def test_what_is_held_whole_is_not_loaded() -> None:
    world = make_world()
    world.arrive(2 * BT)
    run(world)
    world.arrive(2 * BT, sources=(KVSource("store", 2),))
    assert not loads(world)
    assert run(world) == [[(2, 31, 32)]]


def test_a_load_that_saves_steps_pays_though_steps_are_not_known_to_grow() -> None:
    """The timings at the start gave a step's fixed part alone: the prompt takes two steps, its tail one."""
    world = World(staged(1, max_num_batched_tokens=40), Speeds(prefill_base_s=0.05, load_bytes_per_s=1e9))
    _, load = loading(world, 60, 3)
    assert len(load.blocks) == 3


def test_a_complete_load_needs_no_gate() -> None:
    world = make_world(max_num_batched_tokens=4 * BT)
    world.arrive(4 * BT, 9)
    _, load = loading(world, 40, 2)
    world.load_all(load.io)
    world.run_step(1)
    (step,) = world.steps.values()
    assert step.order.chunks[0].start == 32
    assert not step.order.gated


@pytest.mark.parametrize(("whole", "start"), [(0, 0), (1, 16)])
def test_a_failed_load_is_computed(whole: int, start: int) -> None:
    world = make_world()
    _, load = loading(world, 60, 3)
    for layer in range(SETTINGS.layers):
        world.memory[layer, load.blocks[0]] = world.clients[1].content(0)
    world.end(load.io, LoadEnded(whole, missing=whole))
    assert run(world)[0] == [(1, start, start + 32)]
    told = world.clients[1].token
    assert told is not None
    assert told.misses == (PrefixMiss(0, whole),)


def test_what_a_peer_does_not_give_is_no_miss() -> None:
    """It may hold the block and not lend it now; what it loses it reports by itself."""
    world = make_world()
    world.arrive(60, sources=(KVSource("peer", 3, peer=True),))
    (load,) = loads(world)
    world.end(load.io, LoadEnded(0, missing=0))
    run(world)
    told = world.clients[1].token
    assert told is not None
    assert (told.computed_tokens, told.misses) == (60, ())


def test_a_load_that_fails_under_its_step_is_computed_when_the_step_is_over() -> None:
    world = make_world(stages=2)
    _, load = loading(world, 60, 3)
    world.load_layer(load.io)
    assert spans(world, min(world.steps)) == [(1, 48, 60)]
    world.end(load.io, LoadEnded(0, failed=True))
    assert world.done[-1] == actions.GiveUpStep(min(world.steps))
    assert len(world.steps) == 1
    assert run(world)[1:] == [[(1, 0, 32)], [(1, 32, 60)]]


def test_another_source_is_tried_before_anything_was_handed_on() -> None:
    world = make_world()
    world.arrive(60, sources=(KVSource("a", 3), KVSource("b", 2)))
    world.end(loads(world)[0].io, LoadEnded(0, failed=True))
    (second,) = loads(world)
    assert (second.source, second.first, len(second.blocks)) == (1, 0, 3)
    world.load_layer(second.io)
    world.arrive(60, 1, sources=(KVSource("a", 3),))
    assert len(loads(world)) == 1, "store a is left alone"


def test_full_blocks_are_written_back_as_they_are_computed() -> None:
    """The first put begins with the first step's end; what a store holds of the prefix is left out."""
    world = make_world()
    world.arrive(70, copies=(events.WriteBackTarget("new", None), events.WriteBackTarget("old", 1)))
    puts = []
    while world.steps:
        world.run_step(min(world.steps))
        puts.append([(a.copy, a.first, len(a.blocks)) for a in world.done if isinstance(a, actions.WriteBackBlocks)])
    assert puts[0] == [(0, 0, 2), (1, 0, 2)], "what is computed here is not there"
    assert puts[1][2:] == [(0, 2, 2), (1, 2, 2)]
    assert world.core.state.manager.num_used == 4, "held by the puts alone"
    world.settle()
    world.check_rest()


def test_many_small_prompts_count_each_by_itself() -> None:
    """A hundred equal prompts take a hundred times one's seconds, not the square in pairs of tokens."""
    speeds = Speeds(prefill_per_token_s=1e-3, prefill_per_pair_s=1e-3)
    world = World(staged(1, num_blocks=1000, max_num_batched_tokens=2 * BT), speeds)
    world.arrive(2 * BT)
    alone_s = world.core.drain_seconds()
    assert alone_s == pytest.approx(32e-3 + 32 * 33 / 2 * 1e-3)
    for family in range(1, 100):
        world.arrive(2 * BT, family)
    assert world.core.drain_seconds() == pytest.approx(100 * alone_s)
    accepted = [action for action in world.done if isinstance(action, actions.AcceptRequest)]
    assert accepted[50].predicted_start_s == pytest.approx(50 * alone_s)


def test_stages_share_the_queue_and_cached_prompts_cost_little() -> None:
    world = World(staged(4, num_blocks=100, max_num_batched_tokens=2 * BT), SPEEDS)
    for family in range(4):
        world.arrive(2 * BT, family)
    single = World(staged(1, num_blocks=100, max_num_batched_tokens=2 * BT), SPEEDS)
    single.arrive(2 * BT)
    step_s = single.core.drain_seconds()
    # Four steps of four stages: the first stage has taken the last one after the time of one step.
    assert world.core.drain_seconds() == pytest.approx(step_s)
    single.settle()
    single.arrive(2 * BT)
    last = prefill_seconds(single.core.state.tracker.speeds, 1, 2 * BT - 1)
    assert single.core.drain_seconds() == pytest.approx(last)


def test_a_prompt_that_may_not_reuse_anything_is_computed_whole_and_cached_for_others() -> None:
    world = make_world()
    world.arrive(40)
    assert run(world) == [[(1, 0, 32)], [(1, 32, 40)]]
    world.arrive(40, sources=(KVSource("store", 2),), reuse=False)
    assert not loads(world)
    assert run(world) == [[(2, 0, 32)], [(2, 32, 40)]]
    token = world.clients[2].token
    assert token is not None
    assert (token.cached_tokens, token.loaded_tokens, token.computed_tokens) == (0, 0, 40)
    world.arrive(40)
    assert run(world) == [[(3, 32, 40)]]
