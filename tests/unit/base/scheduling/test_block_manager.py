import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.base.kv.blocks import KeyChanges
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_manager import COLD_S, BlockManager, OutOfBlocks
from tests.examples import examples
from tests.unit.base.scheduling.helpers import key


def state(manager: BlockManager) -> tuple[int, int, int]:
    manager.check_invariants()
    return manager.num_used, manager.num_cached, manager.num_free


def test_blocks_are_handed_out_in_order_and_the_last_freed_comes_first() -> None:
    manager = BlockManager(4)
    assert manager.allocate(3) == [0, 1, 2]
    manager.release([0, 1])
    assert state(manager) == (1, 0, 3)
    assert manager.allocate(3) == [0, 1, 3]
    assert state(manager) == (4, 0, 0)


def test_too_many_blocks_change_nothing() -> None:
    manager = BlockManager(2)
    manager.allocate(1)
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 free and 0 cached"):
        manager.allocate(2)
    assert state(manager) == (1, 0, 1)
    assert manager.allocate(0) == []


def test_a_registered_block_is_cached_when_released_and_found_again() -> None:
    manager = BlockManager(3)
    blocks = manager.allocate(2)
    assert manager.register(0, key(1))
    assert manager.register(1, key(2))
    manager.release(blocks)
    assert state(manager) == (0, 2, 1)
    assert manager.match([key(1), key(2), key(3)]) == [0, 1]
    assert manager.match([key(3), key(1)]) == []
    manager.acquire([0])
    assert state(manager) == (1, 1, 1)
    manager.acquire([0])
    manager.release([0])
    assert manager.ref_count(0) == 1
    assert state(manager) == (1, 1, 1)


def test_another_manager_takes_over_keys_and_the_order_of_eviction() -> None:
    """What one has cached, the other finds and evicts in the same order; nobody is told of it as a change."""
    former, manager = BlockManager(4), BlockManager(4)
    blocks = former.allocate(3)
    for n, block in enumerate(blocks):
        former.register(block, key(n))
    former.release([2])
    former.release([0, 1])
    manager.take_over(former)
    assert state(manager) == (0, 3, 1)
    assert set(manager.keys()) == {key(0), key(1), key(2)}
    assert manager.take_events() == KeyChanges()
    assert manager.match([key(0), key(1)]) == [0, 1]
    assert manager.allocate(2) == [3, 2]
    assert manager.take_events() == KeyChanges((), (key(2),))


def test_a_pool_with_references_or_of_another_size_is_not_taken_over() -> None:
    former = BlockManager(4)
    with pytest.raises(AssertionError, match="not the same pool"):
        BlockManager(5).take_over(former)
    former.allocate(1)
    with pytest.raises(AssertionError, match="1 blocks are referenced"):
        BlockManager(4).take_over(former)


def test_eviction_takes_the_tail_of_the_least_recently_used_chain() -> None:
    manager = BlockManager(4)
    first, second = manager.allocate(2), manager.allocate(2)
    for n, block in enumerate([*first, *second]):
        manager.register(block, key(n))
    manager.release(first)
    manager.release(second)
    assert manager.allocate(1) == [1]
    assert manager.match([key(0), key(1)]) == [0]
    assert manager.allocate(1) == [0]
    assert manager.allocate(1) == [3]
    assert manager.keys() == [key(2)]
    assert state(manager) == (3, 1, 0)


def test_a_head_used_again_is_evicted_after_others() -> None:
    manager = BlockManager(3)
    blocks = manager.allocate(3)
    for block in blocks:
        manager.register(block, key(block))
    manager.release(blocks)
    manager.acquire([0, 1])
    manager.release([0, 1])
    assert [manager.allocate(1)[0] for _ in range(3)] == [2, 1, 0]


def test_the_older_block_keeps_a_key() -> None:
    manager = BlockManager(2)
    manager.allocate(2)
    assert manager.register(0, key(7))
    assert not manager.register(1, key(7))
    assert manager.register(0, key(7))
    manager.release([0, 1])
    assert state(manager) == (0, 1, 1)
    assert manager.key_of(1) is None


def test_events_are_net_changes() -> None:
    manager = BlockManager(1)
    manager.allocate(1)
    manager.register(0, key(1))
    assert manager.take_events() == KeyChanges((key(1),))
    manager.release([0])
    manager.allocate(1)  # evicts key 1
    manager.register(0, key(2))
    manager.release([0])
    manager.allocate(1)  # evicts key 2, which nobody has heard of
    manager.register(0, key(1))
    assert manager.take_events() == KeyChanges()
    manager.release([0])
    manager.allocate(1)
    assert manager.take_events() == KeyChanges((), (key(1),))
    manager.check_invariants()


class BlockMachine(RuleBasedStateMachine):
    """Any order of calls keeps the invariants; a listener's picture of the keys is always right."""

    blocks = 6

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(self.blocks)
        self.held: list[list[int]] = []
        self.heard: set[bytes] = set()

    @rule(n=st.integers(1, 4), first=st.integers(0, 5))
    def compute(self, n: int, first: int) -> None:
        """A sequence of n full blocks: what is there is shared, the rest computed and registered."""
        keys = [key(first + i) for i in range(n)]
        found = self.manager.match(keys)
        self.manager.acquire(found)
        self.held.append(found)
        if not self.manager.can_allocate(n - len(found)):
            with pytest.raises(OutOfBlocks):
                self.manager.allocate(n - len(found))
            return
        found += self.manager.allocate(n - len(found))
        for block, its_key in zip(found, keys, strict=True):
            self.manager.register(block, its_key)

    @rule(n=st.integers(1, 3))
    def scratch(self, n: int) -> None:
        if self.manager.can_allocate(n):
            self.held.append(self.manager.allocate(n))

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 20), first=st.integers(0, 8))
    def register_late(self, index: int, first: int) -> None:
        for n, block in enumerate(self.held[index % len(self.held)]):
            if self.manager.key_of(block) is None:
                self.manager.register(block, key(first + n))

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 20))
    def release(self, index: int) -> None:
        self.manager.release(self.held.pop(index % len(self.held)))

    @precondition(lambda self: len(self.held) > 2)
    @rule()
    def release_oldest(self) -> None:
        self.manager.release(self.held.pop(0))

    @rule()
    def listen(self) -> None:
        events = self.manager.take_events()
        self.heard |= set(events.stored)
        self.heard -= set(events.removed)
        assert self.heard == set(self.manager.keys())

    @invariant()
    def holds(self) -> None:
        self.manager.check_invariants()
        for block in range(self.blocks):
            assert self.manager.ref_count(block) == sum(blocks.count(block) for blocks in self.held)

    def teardown(self) -> None:
        for blocks in self.held:
            self.manager.release(blocks)
        assert self.manager.num_used == 0
        assert self.manager.num_available == self.blocks


BlockMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40)
TestBlockMachine = BlockMachine.TestCase


@pytest.mark.parametrize("seed", range(4))
def test_long_walks(seed: int) -> None:
    """Deep states, which short examples hardly reach."""
    rng = random.Random(seed)
    machine = BlockMachine()
    for _ in range(800):
        choice = rng.random()
        if choice < 0.3:
            machine.compute(n=rng.randint(1, 4), first=rng.randint(0, 5))
        elif choice < 0.4:
            machine.scratch(n=rng.randint(1, 3))
        elif choice < 0.5 and machine.held:
            machine.register_late(index=rng.randint(0, 20), first=rng.randint(0, 8))
        elif choice < 0.95 and machine.held:
            machine.release(index=rng.randint(0, 20))
        else:
            machine.listen()
        machine.holds()
    machine.teardown()


def test_a_copy_that_nobody_uses_is_evicted_first_when_it_is_cold() -> None:
    """Its chain's tail before its head; a used one is as any other."""
    manager = BlockManager(4)
    blocks = manager.allocate(4)
    for number, block in enumerate(blocks):
        manager.register(block, BlockKey(bytes([number]) * 32))
    manager.release(blocks[:1])
    manager.release(blocks[1:])
    manager.note_copies(blocks[1:])
    manager.now = COLD_S - 1
    assert manager.allocate(1) == blocks[:1], "used least recently"
    manager.release(blocks[:1])
    manager.now = COLD_S
    manager.acquire(blocks[3:])
    manager.release(blocks[3:])
    assert manager.allocate(3) == [blocks[0], blocks[2], blocks[1]]
    manager.check_invariants()
