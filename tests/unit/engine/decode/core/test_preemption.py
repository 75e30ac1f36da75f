"""Who is preempted, how, and how they come back."""

from dataclasses import replace

import pytest

from moonpool.base.scheduling.latency import Speeds
from moonpool.engine.decode.core.actions import StartRun, SwapIn, SwapOut
from moonpool.engine.decode.core.events import AbortRequest
from moonpool.engine.decode.core.preemption import choose_victim
from moonpool.engine.decode.core.request import RequestStatus
from moonpool.engine.decode.core.settings import DecodeSettings, Preemption
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.world import SPEEDS, WAYS, World, config, preemptible


def test_last_come_is_first_preempted_and_the_oldest_never() -> None:
    first, second, third = preemptible(1), preemptible(2), preemptible(3)
    assert choose_victim([second, first, third], first) is third
    assert choose_victim([second, first, third], third) is third
    assert choose_victim([first, second], second) is second
    assert choose_victim([first], first) is None


def test_who_was_preempted_twice_is_spared() -> None:
    first, second, third = preemptible(1), preemptible(2), preemptible(3, preemptions=2)
    assert choose_victim([first, second, third], first) is second
    assert choose_victim([first, second, third], second) is second
    assert choose_victim([first, third], first) is third, "somebody must"


def crowded(core: DecodeSettings) -> tuple[World, int, int]:
    """Two sequences that fill the pool; the next block that the older one needs is the younger one's."""
    world = World(core)
    older, younger = world.go(prompt(BT, 1), 4 * BT), world.go(prompt(BT, 2), 4 * BT)
    while not world.core.preempted.preemptions:
        world.step()
    return world, older, younger


SMALL = config(6, assumed_answer_tokens=1, chunked_prefill_size=20, swap_blocks=10)


@pytest.mark.parametrize("way", WAYS)
def test_the_younger_gives_up_and_comes_back(way: Preemption) -> None:
    world, older, younger = crowded(replace(SMALL, preemption=way))
    assert world.core.requests[younger].preemption.count == 1
    assert world.core.requests[older].status is RequestStatus.RUNNING or way is Preemption.SWAP
    world.work()
    assert [len(world.answers[number]) for number in (older, younger)] == [4 * BT, 4 * BT]
    again = world.core.planner.recomputed_tokens
    assert (again == 0) == (way is Preemption.SWAP)
    world.assert_at_rest()


@pytest.mark.parametrize(("blocks", "kept"), [(6, 1), (7, 2)])
def test_only_what_the_pool_has_lost_is_computed(blocks: int, kept: int) -> None:
    """A request comes back with the blocks that nobody has taken."""
    world, _, younger = crowded(replace(SMALL, num_blocks=blocks, preemption=Preemption.RECOMPUTE))
    world.work()
    chunks = [chunk for action in world.actions if isinstance(action, StartRun) for chunk in action.chunks]
    assert {chunk.id for chunk in chunks} == {younger}
    assert chunks[-1].sample
    assert not any(chunk.sample for chunk in chunks[:-1])
    assert all(chunk.count <= SMALL.chunked_prefill_size for chunk in chunks)
    assert chunks[0].start == kept * BT


def test_the_quicker_way_is_taken() -> None:
    """Computing 2 s a token, or nothing at all: copying, or computing again."""
    slow, quick = Speeds(prefill_per_token_s=2.0), Speeds(prefill_per_token_s=1e-12)
    for speeds, swaps in ((slow, 1), (quick, 0)):
        world, *_ = crowded(replace(SMALL, speeds=speeds, preemption=Preemption.AUTO))
        assert world.core.preempted.swaps == swaps


def test_without_room_for_a_copy_it_is_computed_again() -> None:
    world, *_ = crowded(replace(SMALL, preemption=Preemption.SWAP, swap_blocks=1))
    assert world.core.preempted.swaps == 0
    world.work()
    world.assert_at_rest()


def test_a_copy_that_fails_costs_computing_again() -> None:
    world, _, younger = crowded(replace(SMALL, preemption=Preemption.SWAP))
    [out] = world.ios.values()
    assert isinstance(out, SwapOut)
    world.end_io(out.io, ok=False)
    world.work()
    assert world.core.planner.recomputed_tokens > 0
    assert len(world.answers[younger]) == 4 * BT


@pytest.mark.parametrize("out", [True, False])
def test_ended_while_it_is_copied_it_keeps_its_blocks_until_the_copy_is_over(out: bool) -> None:
    world, older, younger = crowded(replace(SMALL, preemption=Preemption.SWAP))
    wanted = SwapOut if out else SwapIn
    while not any(isinstance(action, wanted) for action in world.ios.values()):
        if world.ios:
            world.end_io(min(world.ios))
        else:
            world.step()
    world.post(AbortRequest(younger, "cancelled"))
    assert world.core.requests[younger].status is RequestStatus.FINISHING
    world.work()
    assert len(world.answers[older]) == 4 * BT
    world.assert_at_rest()


def test_catching_up_leaves_the_others_their_promised_time() -> None:
    """A batch of one takes 2 ms of the 3 ms that were promised: ten tokens are computed again beside it, not twenty."""
    core = replace(SMALL, preemption=Preemption.RECOMPUTE, preempt_every=3)
    world = World(core)
    limit = SPEEDS.decode_base_s + 2 * SPEEDS.decode_per_sequence_s
    world.go(prompt(BT, 1), BT, slo=limit)
    world.go(prompt(BT, 2), BT)
    world.work()
    shared = [run for run in world.actions if isinstance(run, StartRun) and run.batch == (1,) and run.chunks]
    assert shared
    assert all(sum(chunk.count for chunk in run.chunks) <= 10 for run in shared)
    world.assert_at_rest()


def test_who_was_swapped_out_leaves_the_block_that_an_older_one_waits_for() -> None:
    """Two that fill the pool: the second one would take the first one's next block and be preempted for it for ever."""
    world = World(config(22, preemption=Preemption.SWAP, swap_blocks=40, assumed_answer_tokens=2, max_num_seqs=2))
    first, second = (world.go(prompt(10 * BT - 1, seed), 5 * BT, total=20 * BT) for seed in (1, 2))
    world.work(limit=1000)
    assert (len(world.answers[first]), len(world.answers[second])) == (5 * BT, 5 * BT)
    assert 0 < world.core.preempted.swaps < 5
    world.assert_at_rest()
