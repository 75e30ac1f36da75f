"""Chunk plans, exactly: which tokens of which requests each step computes."""

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.scheduling.latency import Speeds, prefill_seconds
from moonpool.engine.prefill.core import actions, events
from moonpool.engine.prefill.core.scheduler import PrefillScheduler
from tests.unit.engine.prefill.world import BT, SETTINGS, SPEEDS, Client, World, staged

Span = tuple[int, int, int]


def world(*, stages: int = 1, max_num_batched_tokens: int = 2 * BT, blocks: int = 16) -> World:
    return World(staged(stages, max_num_batched_tokens=max_num_batched_tokens, blocks=blocks))


def spans(it: World, io: int) -> list[Span]:
    return [(chunk.id, chunk.start, chunk.end) for chunk in it.steps[io].order.chunks]


def run(it: World) -> list[list[Span]]:
    """Runs all steps to the end; returns their spans."""
    steps = []
    while it.steps:
        io = min(it.steps)
        steps.append(spans(it, io))
        it.run_step(io)
    return steps


def loads(it: World) -> list[actions.LoadBlocks]:
    return [action for action in it.ios.values() if isinstance(action, actions.LoadBlocks)]


def test_chunks_end_on_block_borders_and_steps_are_packed() -> None:
    it = world(max_num_batched_tokens=40)
    it.arrive(50)
    it.arrive(10, 1)
    it.arrive(100, 2)
    # 40 tokens hold two blocks; the 12 left in the second step are no chunk of 3; its end need not be on a border.
    assert run(it) == [[(1, 0, 32)], [(1, 32, 50), (2, 0, 10)], [(3, 0, 32)], [(3, 32, 64)], [(3, 64, 100)]]
    assert it.core.state.manager.num_used == 0
    assert it.core.state.manager.num_cached == 3 + 0 + 6


def test_a_prompt_whose_tokens_take_long_has_short_chunks_and_pays_for_them() -> None:
    """Other tenants' prompts come in between, and no step takes longer than with other prompts."""
    it = world(max_num_batched_tokens=320, blocks=64)
    it.arrive(320, 1, tenant="ann", token_cost=10)
    it.arrive(320, 2, tenant="bob")
    assert run(it) == [
        [(1, 0, 32)],
        [(2, 0, 320)],
        *([(1, start, start + 32)] for start in range(32, 320, 32)),
    ]
    few = world(max_num_batched_tokens=80)
    few.arrive(40, 3, token_cost=10)
    assert run(few) == [[(1, 0, 16)], [(1, 16, 32)], [(1, 32, 40)]], "a block at least"


def test_what_a_step_says() -> None:
    it = world()
    it.arrive(40)
    (order,) = [action for action in it.done if isinstance(action, actions.RunStep)]
    assert order == actions.RunStep(1, (actions.ChunkOrder(1, 0, 32, (0, 1), last=False),), gated=False)
    it.run_step(1)
    assert it.core.state.manager.keys() == list(it.clients[1].arrive.request.keys)
    assert it.steps[2].order.chunks == (actions.ChunkOrder(1, 32, 40, (0, 1, 2), last=True),)
    it.now = 3.0
    it.run_step(2)
    assert it.done[-2:] == [
        actions.ReportFirstToken(1, 0, 0, 40, 0.0, 3.0, ()),
        actions.EndRequest(1, actions.PrefillOutcome.DONE),
    ]


@pytest.mark.parametrize("tokens", [BT - 1, BT, BT + 1, 3 * BT - 1, 3 * BT, 3 * BT + 1])
def test_a_cached_prefix_is_not_computed_but_the_last_token_is(tokens: int) -> None:
    """Of a prompt of full blocks that are all there, a step computes one token and writes nothing."""
    it = world()
    it.arrive(tokens)
    run(it)
    it.arrive(tokens, held=0)
    full, rest = divmod(tokens, BT)
    start = full * BT - (not rest)
    chunk = actions.ChunkOrder(2, start, tokens, it.steps[max(it.steps)].order.chunks[0].blocks, True, not rest)
    assert it.steps[max(it.steps)].order.chunks == (chunk,)
    assert len(set(chunk.blocks)) == full + (rest > 0)
    assert it.core.state.manager.num_used == len(chunk.blocks)
    it.settle()
    told = it.clients[2].token
    assert told is not None
    assert (told.cached_tokens, told.computed_tokens) == (start, tokens - start)
    assert it.core.state.manager.num_cached == full


def test_two_full_hits_share_a_step() -> None:
    """Neither waits for the other's block: none is made."""
    it = world()
    it.arrive(2 * BT)
    it.arrive(1, 1)
    it.run_step(1)
    for tokens in (2 * BT, 2 * BT, BT + 3):
        it.arrive(tokens)
    assert run(it) == [[(2, 0, 1)], [(3, 31, 32), (4, 31, 32), (5, 16, 19)]]


def test_a_recurrent_state_is_never_gone_back_from() -> None:
    """A prompt of full blocks that are all there computes the last one again."""
    it = World(staged(1, max_num_batched_tokens=2 * BT, blocks=16, recurrent=True))
    it.arrive(2 * BT)
    it.run_step(1)
    it.arrive(2 * BT)
    it.arrive(2 * BT + 1)
    assert run(it) == [[(2, 16, 32)], [(3, 32, 33)]]


def test_a_prompt_becomes_a_full_hit_while_it_waits() -> None:
    """What computes its last block is one step ahead; that block is found when it is done."""
    it = world(stages=2, max_num_batched_tokens=BT)
    it.arrive(2 * BT)
    it.run_step(1)
    it.arrive(2 * BT)
    assert run(it) == [[(1, 16, 32)], [(2, 31, 32)]]


def test_blocks_computed_meanwhile_are_matched_again() -> None:
    it = world()
    it.arrive(40)
    it.arrive(60)
    assert it.core.state.requests[2].prefix.cached == 0
    assert run(it) == [[(1, 0, 32)], [(1, 32, 40), (2, 32, 48)], [(2, 48, 60)]]
    told = it.clients[2].token
    assert told is not None
    assert (told.cached_tokens, told.computed_tokens) == (32, 28)


def test_nothing_is_computed_twice_at_once() -> None:
    """A prompt that begins like one in flight waits for it; one that differs goes first."""
    it = world(stages=2, max_num_batched_tokens=4 * BT)
    it.arrive(4 * BT)
    it.arrive(5 * BT)
    it.arrive(10, 1)
    assert [spans(it, io) for io in it.steps] == [[(1, 0, 64)], [(3, 0, 10)]]
    assert run(it)[2:] == [[(2, 64, 80)]]


def test_a_prompt_waits_for_blocks_and_keeps_its_turn() -> None:
    it = world(blocks=4)
    for tokens in (3 * BT - 1, 2 * BT - 1, 1):
        it.arrive(tokens, len(it.clients))
    assert (len(it.core.state.waiting), len(it.core.state.started), it.core.queued_tokens) == (2, 1, 47 + 31 + 1)
    assert run(it) == [[(1, 0, 32)], [(1, 32, 47)], [(2, 0, 31), (3, 0, 1)]]


def test_requests_are_not_started_far_ahead() -> None:
    it = world(max_num_batched_tokens=BT)
    for family in range(3):
        it.arrive(2 * BT, family)
    assert list(it.core.state.started) == [1, 2]  # two steps of work, and what the first step leaves
    it.run_step(1)
    assert list(it.core.state.started) == [1, 2]


@pytest.mark.parametrize(("load_s", "at_once"), [(0.7, False), (0.8, True)])
def test_a_request_with_a_load_starts_as_much_sooner_as_the_load_takes(load_s: float, at_once: bool) -> None:
    """Seven blocks are left before the request: three more than two steps have, which take 0.75 s."""
    speeds = Speeds(prefill_per_token_s=0.25 / BT, load_bytes_per_s=6 * 3 * SETTINGS.slice_bytes / load_s)
    it = World(staged(1, max_num_batched_tokens=2 * BT, blocks=32), speeds)
    it.arrive(9 * BT)
    it.arrive(6 * BT + 1, 1, sources=(events.KVSource("store", 6),))
    assert bool(loads(it)) is at_once
    it.run_step(min(it.steps))  # five are left
    assert len(loads(it)) == 1


def test_what_is_refused() -> None:
    it = World(staged(1, blocks=2, max_queue=2))
    it.arrive(33)
    it.arrive(32)
    it.arrive(1, 1)
    it.arrive(1, 2)
    it.post(events.Drain())
    it.arrive(1, 3)
    refused = [action for action in it.done if isinstance(action, actions.RefuseRequest)]
    assert [(action.id, action.why) for action in refused] == [
        (1, actions.RefusalReason.TOO_LONG),
        (4, actions.RefusalReason.QUEUE_FULL),
        (5, actions.RefusalReason.DRAINING),
    ]
    assert refused[1].retry_after_s >= 0.1
    with pytest.raises(ConfigError, match="at least one block"):
        PrefillScheduler(staged(1, max_num_batched_tokens=BT - 1), Speeds())


def test_what_finds_a_longer_queue_than_it_may_is_not_taken_and_leaves_nothing() -> None:
    it = world()
    it.arrive(40)
    drain_s = it.core.drain_seconds()
    it.arrive(16, 1, max_queue_s=drain_s / 2)
    it.arrive(16, 1, max_queue_s=drain_s)
    told = [action for action in it.done if isinstance(action, actions.RefuseStaleRequest | actions.AcceptRequest)]
    assert told[1:] == [actions.RefuseStaleRequest(2, drain_s, taken=1), actions.AcceptRequest(3, drain_s)]
    assert list(it.core.state.requests) == [1, 3]


def test_two_stages_take_two_steps_of_one_prompt() -> None:
    it = world(stages=2)
    it.arrive(80)
    assert [spans(it, 1), spans(it, 2)] == [[(1, 0, 32)], [(1, 32, 64)]]
    assert list(it.steps) == [1, 2]
    it.run_step(1)
    assert spans(it, 3) == [(1, 64, 80)]
    assert run(it)
    assert it.clients[1].end is not None


def test_a_step_that_the_engine_gives_up_ends_its_requests() -> None:
    it = world(stages=2)
    it.arrive(80)
    it.end_step(1, aborted=True)
    client = it.clients[1]
    assert client.end == actions.EndRequest(1, actions.PrefillOutcome.STEP_GIVEN_UP)
    assert it.steps[2].aborted, "nothing of the second step counts"
    assert it.core.state.manager.num_used == 5, "it still writes"
    run(it)
    it.check_rest()


def test_leaving_keeps_the_blocks_until_the_steps_are_over() -> None:
    it = world(stages=2)
    it.arrive(80)
    it.arrive(10, 1)
    it.post(events.CancelPrefill(1))
    assert it.clients[1].end == actions.EndRequest(1, actions.PrefillOutcome.LEFT)
    assert it.core.state.manager.num_used == 6
    it.run_step(1)
    assert it.core.state.manager.num_used == 6
    it.run_step(2)
    assert it.core.state.manager.num_used == 1
    run(it)
    it.check_rest()


def loading(it: World, tokens: int, blocks: int, family: int = 0) -> tuple[Client, actions.LoadBlocks]:
    client = it.arrive(tokens, family, sources=(events.KVSource("store", blocks),))
    return client, loads(it)[-1]


def test_a_loading_request_shares_a_step_whose_gate_is_the_least_of_its_requests() -> None:
    """Before its first layer has come, others go without it; then it joins them."""
    it = world(max_num_batched_tokens=4 * BT)
    it.arrive(4 * BT, 9)
    _, first = loading(it, 60, 2)
    _, second = loading(it, 60, 3, 1)
    it.arrive(4, 2)
    it.load_layer(first.io)
    it.load_layer(second.io)
    it.load_layer(second.io)
    assert not it.steps[1].order.gated
    it.run_step(1)
    (step,) = it.steps
    assert spans(it, step) == [(2, 32, 60), (3, 48, 60), (4, 0, 4)]
    assert it.steps[step].opened == 0
    it.load_layer(first.io)
    assert it.steps[step].opened == 1
    it.load_all(second.io)
    assert it.steps[step].opened == 1
    it.load_all(first.io)
    assert it.steps[step].opened == 2
    run(it)
    it.check_rest()
    told = it.clients[2].token
    assert told is not None
    assert (told.loaded_tokens, told.computed_tokens) == (32, 28)


def test_nothing_is_built_on_a_gated_chunk_before_it_is_done() -> None:
    it = world(stages=3)
    _, load = loading(it, 100, 2)
    it.load_layer(load.io)
    assert [spans(it, io) for io in it.steps] == [[(1, 32, 64)]]
    it.load_all(load.io)
    assert len(it.steps) == 1
    assert run(it) == [[(1, 32, 64)], [(1, 64, 96)], [(1, 96, 100)]]


@pytest.mark.parametrize("busy", [False, True])
def test_a_load_of_the_whole_prompt_leaves_its_last_token(busy: bool) -> None:
    """Followed layer by layer, or there before the engine is free: nothing is written."""
    it = world()
    if busy:
        it.arrive(1, 1)
    client, load = loading(it, 3 * BT, 3)
    it.load_all(load.io)
    if busy:
        it.run_step(1)
    (order,) = [step.order for step in it.steps.values()]
    assert [(chunk.start, chunk.end, chunk.full_hit) for chunk in order.chunks] == [(47, 48, True)]
    assert order.gated != busy
    assert run(it) == [[(1 + busy, 47, 48)]]
    assert client.token is not None
    assert (client.token.loaded_tokens, client.token.computed_tokens) == (47, 1)
    assert it.core.state.manager.keys() == list(client.arrive.request.keys)


def test_what_is_held_whole_is_not_loaded() -> None:
    it = world()
    it.arrive(2 * BT)
    run(it)
    it.arrive(2 * BT, sources=(events.KVSource("store", 2),))
    assert not loads(it)
    assert run(it) == [[(2, 31, 32)]]


def test_a_load_that_saves_steps_pays_though_steps_are_not_known_to_grow() -> None:
    """The timings at the start gave a step's fixed part alone: the prompt takes two steps, its tail one."""
    it = World(staged(1, max_num_batched_tokens=40), Speeds(prefill_base_s=0.05, load_bytes_per_s=1e9))
    _, load = loading(it, 60, 3)
    assert len(load.blocks) == 3


def test_a_complete_load_needs_no_gate() -> None:
    it = world(max_num_batched_tokens=4 * BT)
    it.arrive(4 * BT, 9)
    _, load = loading(it, 40, 2)
    it.load_all(load.io)
    it.run_step(1)
    (step,) = it.steps.values()
    assert step.order.chunks[0].start == 32
    assert not step.order.gated


@pytest.mark.parametrize(("whole", "start"), [(0, 0), (1, 16)])
def test_a_failed_load_is_computed(whole: int, start: int) -> None:
    it = world()
    _, load = loading(it, 60, 3)
    for layer in range(SETTINGS.layers):
        it.pool[layer, load.blocks[0]] = it.clients[1].content(0)
    it.end(load.io, events.LoadEnded(whole, missing=whole))
    assert run(it)[0] == [(1, start, start + 32)]
    told = it.clients[1].token
    assert told is not None
    assert told.misses == (actions.PrefixMiss(0, whole),)


def test_what_a_peer_does_not_give_is_no_miss() -> None:
    """It may hold the block and not lend it now; what it loses it reports by itself."""
    it = world()
    it.arrive(60, sources=(events.KVSource("peer", 3, peer=True),))
    (load,) = loads(it)
    it.end(load.io, events.LoadEnded(0, missing=0))
    run(it)
    told = it.clients[1].token
    assert told is not None
    assert (told.computed_tokens, told.misses) == (60, ())


def test_a_load_that_fails_under_its_step_is_computed_when_the_step_is_over() -> None:
    it = world(stages=2)
    _, load = loading(it, 60, 3)
    it.load_layer(load.io)
    assert spans(it, min(it.steps)) == [(1, 48, 60)]
    it.end(load.io, events.LoadEnded(0, failed=True))
    assert it.done[-1] == actions.GiveUpStep(min(it.steps))
    assert len(it.steps) == 1
    assert run(it)[1:] == [[(1, 0, 32)], [(1, 32, 60)]]


def test_another_source_is_tried_before_anything_was_handed_on() -> None:
    it = world()
    it.arrive(60, sources=(events.KVSource("a", 3), events.KVSource("b", 2)))
    it.end(loads(it)[0].io, events.LoadEnded(0, failed=True))
    (second,) = loads(it)
    assert (second.source, second.first, len(second.blocks)) == (1, 0, 3)
    it.load_layer(second.io)
    it.arrive(60, 1, sources=(events.KVSource("a", 3),))
    assert len(loads(it)) == 1, "store a is left alone"


def test_full_blocks_are_written_back_as_they_are_computed() -> None:
    """The first put begins with the first step's end; what a store holds of the prefix is left out."""
    it = world()
    it.arrive(70, copies=(events.WriteBackTarget("new", None), events.WriteBackTarget("old", 1)))
    puts = []
    while it.steps:
        it.run_step(min(it.steps))
        puts.append([(a.copy, a.first, len(a.blocks)) for a in it.done if isinstance(a, actions.WriteBackBlocks)])
    assert puts[0] == [(0, 0, 2), (1, 0, 2)], "what is computed here is not there"
    assert puts[1][2:] == [(0, 2, 2), (1, 2, 2)]
    assert it.core.state.manager.num_used == 4, "held by the puts alone"
    it.settle()
    it.check_rest()


def test_many_small_prompts_count_each_by_itself() -> None:
    """A hundred equal prompts take a hundred times one's seconds, not the square in pairs of tokens."""
    speeds = Speeds(prefill_per_token_s=1e-3, prefill_per_pair_s=1e-3)
    it = World(staged(1, blocks=1000, max_num_batched_tokens=2 * BT), speeds)
    it.arrive(2 * BT)
    one = it.core.drain_seconds()
    assert one == pytest.approx(32e-3 + 32 * 33 / 2 * 1e-3)
    for family in range(1, 100):
        it.arrive(2 * BT, family)
    assert it.core.drain_seconds() == pytest.approx(100 * one)
    accepted = [action for action in it.done if isinstance(action, actions.AcceptRequest)]
    assert accepted[50].predicted_start_s == pytest.approx(50 * one)


def test_stages_share_the_queue_and_cached_prompts_cost_little() -> None:
    it = World(staged(4, blocks=100, max_num_batched_tokens=2 * BT), SPEEDS)
    for family in range(4):
        it.arrive(2 * BT, family)
    single = World(staged(1, blocks=100, max_num_batched_tokens=2 * BT), SPEEDS)
    single.arrive(2 * BT)
    step_s = single.core.drain_seconds()
    # Four steps of four stages: the first stage has taken the last one after the time of one step.
    assert it.core.drain_seconds() == pytest.approx(step_s)
    single.settle()
    single.arrive(2 * BT)
    last = prefill_seconds(single.core.state.tracker.speeds, 1, 2 * BT - 1)
    assert single.core.drain_seconds() == pytest.approx(last)


def test_a_prompt_that_may_not_reuse_anything_is_computed_whole_and_cached_for_others() -> None:
    it = world()
    it.arrive(40)
    assert run(it) == [[(1, 0, 32)], [(1, 32, 40)]]
    it.arrive(40, sources=(events.KVSource("store", 2),), reuse=False)
    assert not loads(it)
    assert run(it) == [[(2, 0, 32)], [(2, 32, 40)]]
    token = it.clients[2].token
    assert token is not None
    assert (token.cached_tokens, token.loaded_tokens, token.computed_tokens) == (0, 0, 40)
    it.arrive(40)
    assert run(it) == [[(3, 32, 40)]]
