"""Groups: several answers to one prompt share its blocks, and run, are preempted and come back together."""

import pytest

from moonpool.engine.decode.core.actions import AppendBlock, SetBlockTable, StartRun, SwapOut
from moonpool.engine.decode.core.events import AbortRequest
from moonpool.engine.decode.core.request import RequestStatus
from moonpool.engine.decode.core.settings import Preemption
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.world import WAYS, World, config


def referred(world: World, block: int) -> int:
    return world.core.blocks.ref_count(block)


def batches(world: World) -> list[tuple[int, ...]]:
    return [action.batch for action in world.actions if isinstance(action, StartRun)]


def test_the_prompt_is_held_once_and_its_last_block_copied_when_it_is_written_to() -> None:
    world = World(config(12))
    number = world.go(prompt(2 * BT + 3), (4, 4, 4))
    tables = [sequence.table for _, sequence in world.group(number)]
    assert world.run is not None
    assert world.run.batch == (number, number + 1, number + 2)
    assert [table[:2] for table in tables] == [tables[0][:2]] * 3
    lasts = [table[2] for table in tables]
    assert len(set(lasts)) == 3, "each writes to a block of its own"
    # The last to be served keeps the block that all had; the others get copies of it.
    assert world.run.copies == ((lasts[2], lasts[0]), (lasts[2], lasts[1]))
    assert [referred(world, block) for block in (*tables[0][:2], *lasts)] == [3, 3, 1, 1, 1]
    assert world.core.blocks.num_used == 5
    world.work()
    world.assert_at_rest()
    world.assert_reruns()


def test_nothing_is_copied_when_the_prompt_fills_its_blocks() -> None:
    world = World(config(12))
    number = world.go(prompt(2 * BT), (BT + 2, BT + 2))
    assert world.run is not None
    assert world.run.copies == ()
    assert world.core.blocks.num_used == 2 + 2
    world.work()
    assert [len(world.answers[number + index]) for index in range(2)] == [BT + 2] * 2
    assert not any(isinstance(action, SetBlockTable) for action in world.actions[-3:])
    world.assert_at_rest()


@pytest.mark.parametrize("length", [1, BT - 1, BT, BT + 1, 2 * BT - 1])
def test_each_grows_at_each_border(length: int) -> None:
    world = World(config(40))
    number = world.go(prompt(length), (2 * BT + 3, BT, 2))
    world.work()
    assert [len(world.answers[number + index]) for index in range(3)] == [2 * BT + 3, BT, 2]
    copies = [action.copies for action in world.actions if isinstance(action, StartRun)]
    assert [len(pairs) for pairs in copies if pairs] == ([2] if length % BT else [])
    assert sum(isinstance(action, AppendBlock) for action in world.actions) >= 2
    world.assert_at_rest()
    world.assert_reruns()


def test_once_each_has_its_own_block_a_run_has_several_steps() -> None:
    world = World(config(12, run_steps=BT))
    group, alone = world.go(prompt(BT + 1), (BT, BT)), world.go(prompt(BT + 1, 1), BT)
    world.work()
    runs = [action for action in world.actions if isinstance(action, StartRun)]
    assert runs[0].steps == 1
    assert runs[0].copies, "nothing may be written before the block is copied"
    assert max(run.steps for run in runs if {group, group + 1, alone} <= set(run.batch)) > BT // 2
    world.assert_at_rest()
    world.assert_reruns()


def test_no_block_is_given_ahead_while_a_group_waits_for_copies_out() -> None:
    """A group of six, longer than expected, needs more blocks than the two that are free; who stays has enough now."""
    swap = Preemption.SWAP
    world = World(config(18, preemption=swap, swap_blocks=9, assumed_answer_tokens=1, ahead_steps=BT, run_steps=BT))
    group = world.reserve(prompt(5), (14,) * 6, priority=-2, total=5 + 14)
    assert group is not None
    world.arrive(group)
    stays, goes = world.go(prompt(2 * BT - 1, 1), 60), world.go(prompt(3 * BT - 1, 2), 60)
    world.start(group)
    while not world.ios:
        world.step()
    assert [action.id for action in world.ios.values()] == [goes]
    assert (world.core.budget.available, world.core.budget.surplus) == (2, 2)
    begun = len(world.actions)
    world.step()
    assert world.actions[begun:] == [StartRun(5, (stays,), steps=4)]
    world.work()
    assert [len(world.answers[group + index]) for index in range(6)] == [14] * 6
    world.assert_at_rest()


def test_one_ends_and_the_others_go_on() -> None:
    world = World(config(12))
    number = world.go(prompt(BT + 1), (2, 5))
    used = world.core.blocks.num_used
    world.step()
    assert world.core.blocks.num_used == used - 1
    assert [member.id for member in world.core.requests[number].sequences] == [number + 1]
    world.work()
    world.assert_at_rest()


def test_some_end_with_their_first_token() -> None:
    world = World(config(12))
    number = world.go(prompt(BT + 1), (1, 3, 1))
    assert world.run is not None
    assert (world.run.batch, world.run.copies) == ((number + 1,), ()), "one alone needs no copy"
    world.work()
    world.assert_at_rest()
    other = world.go(prompt(BT + 1, 2), (1, 1))
    assert other not in world.core.requests
    world.assert_at_rest()


def test_it_takes_its_places_or_none() -> None:
    world = World(config(40, max_num_seqs=4))
    first = world.go(prompt(3), (9, 4, 4))
    second = world.go(prompt(5, 1), (3, 3))
    third = world.go(prompt(5, 2), 3)
    world.step()
    assert batches(world)[-1] == (first, first + 1, first + 2), (
        "who came later waits behind the group that does not fit"
    )
    world.step()
    world.step()
    world.step()
    assert batches(world)[-1] == (first, second, second + 1, third)
    world.work()
    world.assert_at_rest()


def test_stopping_it_stops_all() -> None:
    world = World(config(12))
    number = world.go(prompt(BT + 1), (8, 8))
    world.post(AbortRequest(number, "cancelled"))
    assert world.core.requests[number].status is RequestStatus.FINISHING
    world.step()
    world.assert_at_rest()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [1, BT - 1, BT, 2 * BT + 5])
def test_preempted_after_every_step(way: Preemption, length: int) -> None:
    """All its blocks are taken and come back, shared as before."""
    world = World(config(40, preemption=way, preempt_every=1, swap_blocks=40, chunked_prefill_size=7))
    number = world.go(prompt(length), (BT + 5, 3, BT + 5))
    world.work()
    assert [len(world.answers[number + index]) for index in range(3)] == [BT + 5, 3, BT + 5]
    assert world.core.preempted.preemptions >= BT
    world.assert_at_rest()
    world.assert_reruns()


def test_what_is_shared_is_swapped_and_computed_once() -> None:
    """A group whose blocks were all swapped, or lost, needs no more of them than before."""
    for way in (Preemption.SWAP, Preemption.RECOMPUTE):
        world = World(config(24, preemption=way, preempt_every=4, swap_blocks=40))
        number = world.go(prompt(8 * BT + 1), (6, 6, 6, 6))
        used = world.core.blocks.num_used
        assert used == 8 + 4
        while number in world.core.requests:
            assert world.core.blocks.num_used <= used
            world.step() if world.run is not None else world.end_io(min(world.ios))
        swaps = [action.blocks for action in world.actions if isinstance(action, SwapOut)]
        assert [len(blocks) for blocks in swaps] == ([8 + 4] if way is Preemption.SWAP else [])
        again = world.core.planner.recomputed_tokens
        assert again == (0 if way is Preemption.SWAP else 4 * 5), "the prompt's full blocks are still cached"
        world.assert_at_rest()


def test_a_younger_group_is_preempted_whole() -> None:
    world = World(config(10, assumed_answer_tokens=4))
    old = world.go(prompt(2 * BT, 1), 4 * BT)
    young = world.go(prompt(2 * BT, 2), (3 * BT, 3 * BT))
    seen = set()
    while world.core.requests:
        if (request := world.core.requests.get(young)) is not None:
            seen.add((request.status, len(request.sequences)))
        world.step()
    assert (RequestStatus.PREEMPTED, 2) in seen
    assert len(world.answers[old]) == 4 * BT
    assert [len(world.answers[young + index]) for index in range(2)] == [3 * BT] * 2
    world.assert_at_rest()
    world.assert_reruns()
