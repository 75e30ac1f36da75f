"""Priorities at decode: who gets a place in the batch, who is preempted, and that nobody waits for ever."""

from moonpool.base.scheduling.fair_share import PRIORITY_S
from moonpool.engine.decode.core.preemption import choose_victim
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.world import World, config, preemptible


def test_last_come_of_the_lowest_priority_is_first_preempted() -> None:
    late, low, urgent = preemptible(1, 0.0), preemptible(2, PRIORITY_S), preemptible(3, -PRIORITY_S)
    assert choose_victim([late, low, urgent], urgent) is low
    assert choose_victim([late, urgent], urgent) is late
    assert choose_victim([late, low], low) is low
    assert choose_victim([urgent], low) is None, "the one whose turn is first is spared"


def test_of_equal_priority_the_last_come_is_preempted() -> None:
    low, lower = preemptible(1, PRIORITY_S), preemptible(2, PRIORITY_S)
    assert choose_victim([low, lower, preemptible(3, 0.0)], low) is lower


def test_who_came_long_before_has_overtaken_the_urgent() -> None:
    """A head start is one in time: so the first turn is everybody's at last, and whoever has it can finish."""
    old, urgent = preemptible(1, 0.0), preemptible(2, 2 * PRIORITY_S - PRIORITY_S)
    assert choose_victim([old, urgent], old) is urgent


def test_places_in_the_batch_go_by_priority() -> None:
    world = World(config(40, max_num_seqs=1))
    first = world.go(prompt(5, 1), 3)
    waiting = [world.go(prompt(5, 2 + index), 2, priority=priority) for index, priority in enumerate((1, 0, -1, 0))]
    order: list[int] = []
    while world.run is not None:
        order += [number for number in world.run.batch if number not in order]
        world.step()
    low, next_, urgent, last = waiting
    assert order == [first, urgent, next_, last, low]
    world.assert_at_rest()
    world.assert_reruns()


def test_a_low_one_gives_its_blocks_up_for_one_that_came_later() -> None:
    world = World(config(6, assumed_answer_tokens=1, chunked_prefill_size=20))
    low = world.go(prompt(BT, 1), 4 * BT, priority=1)
    urgent = world.go(prompt(BT, 2), 4 * BT)
    while not world.core.preempted.preemptions:
        world.step()
    assert world.core.requests[low].preemption.count == 1
    assert world.core.requests[urgent].preemption.count == 0
    world.work()
    assert [len(world.answers[number]) for number in (low, urgent)] == [4 * BT, 4 * BT]
    world.assert_at_rest()
    world.assert_reruns()
