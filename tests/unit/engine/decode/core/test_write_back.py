"""Full blocks of answers go to kvstores."""

from moonpool.engine.decode.core.actions import StoreBlock
from tests.unit.engine.decode.core.sequence import BT, prompt
from tests.unit.engine.decode.core.world import World, config

ANSWER = 4 * BT


def test_a_write_that_fails_is_not_believed() -> None:
    """The store is believed to have a block while the block is being written; the block is not written again."""
    world = World(config(6))
    number = world.go(prompt(BT), ANSWER, stores=1)
    [sequence] = world.core.requests[number].sequences
    assert sequence.stored == [1], "of the prompt, prefill has taken care"
    while not world.ios:
        world.step()
    [io] = world.ios
    assert sequence.stored == [2]
    world.end_io(io, ok=False)
    assert sequence.stored == [1]
    world.work()
    assert [action.index for action in world.actions if isinstance(action, StoreBlock)] == [1, 2, 3]
    assert len(world.answers[number]) == ANSWER
    world.assert_at_rest()
    world.assert_reruns()
