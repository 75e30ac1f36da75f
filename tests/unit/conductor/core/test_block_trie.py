"""The trie of blocks: exact cases, and the index over it against a plain replica."""

import pickle

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moonpool.conductor.core.block_trie import BlockTrie
from moonpool.conductor.core.instance_sets import EMPTY_SET, InstanceSets, slots_in
from moonpool.conductor.core.lru_list import LRU_END, LruList
from moonpool.conductor.core.prefix_index import KeyEventResult, PrefixIndex
from tests.examples import examples


def chain(*names: str) -> list[bytes]:
    """Keys of a chain: each says all that came before it, as a hash does."""
    return ["/".join(names[: end + 1]).encode() for end in range(len(names))]


ABCD = chain("a", "b", "c", "d")
ABXY = chain("a", "b", "x", "y")


def test_a_match_names_everyone_where_its_prefix_ends() -> None:
    forest = BlockTrie(100)
    first, second, third = (forest.open_slot() for _ in range(3))
    forest.store(first, ABCD, 1)
    forest.store(second, ABCD[:2], 1)
    forest.store(third, [ABCD[0], ABCD[2]], 1)
    assert forest.match(ABCD) == [(1, 0b111), (2, 0b011), (4, 0b001)]
    assert forest.match(ABXY) == [(1, 0b111), (2, 0b011)]
    assert forest.match([]) == forest.match(chain("z")) == []
    forest.store(second, ABXY[2:], 1)
    assert forest.match(ABXY) == [(1, 0b111), (2, 0b011), (4, 0b010)]
    forest.check_invariants()


def test_long_chains_with_many_lengths() -> None:
    keys = chain(*map(str, range(300)))
    forest, lengths = BlockTrie(1000), [1, 2, 3, 64, 65, 127, 200, 299, 300]
    for length in lengths:
        forest.store(forest.open_slot(), keys[:length], 1)
    for _ in range(2):  # linked by the first match
        found = forest.match(keys)
        assert [blocks for blocks, _ in found] == lengths
        assert [mask.bit_count() for _, mask in found] == [*range(9, 0, -1)]
    assert [blocks for blocks, _ in forest.match(keys[:150])] == [1, 2, 3, 64, 65, 127, 150]


def test_a_hole_hides_what_follows_until_it_is_filled() -> None:
    forest = BlockTrie(100)
    slot = forest.open_slot()
    forest.store(slot, ABCD, 1)
    assert forest.match(ABCD) == [(4, 1)]
    forest.drop(slot, ABCD[1:2])
    assert forest.match(ABCD) == [(1, 1)]
    assert (len(forest), forest.held(slot)) == (4, 3)  # the block stays: others are linked below it
    forest.check_invariants()
    forest.store(slot, ABCD[1:2], 2)
    assert forest.match(ABCD) == [(4, 1)]
    forest.drop(slot, [ABCD[1], ABCD[2], ABCD[3]])
    assert (len(forest), forest.held(slot)) == (1, 1)
    forest.check_invariants()


def test_a_closed_slot_counts_at_once_for_nothing_and_is_used_again_after_a_sweep() -> None:
    forest = BlockTrie(1000)
    first, second = forest.open_slot(), forest.open_slot()
    keys = chain(*map(str, range(200)))
    forest.store(first, keys, 1)
    forest.store(second, keys[:50], 1)
    forest.close_slot(first)
    assert forest.match(keys) == [(50, 0b10)]
    assert keys[100] not in forest
    assert forest.open_slot() == 2
    forest.sweep(100)
    forest.check_invariants()
    assert forest.unswept
    while forest.unswept:
        forest.sweep(100)
        forest.check_invariants()
    assert len(forest) == 50
    assert forest.open_slot() == first
    assert forest.match(keys) == [(50, 0b10)]


def test_beyond_the_bound_the_ends_of_chains_unused_longest_go_first() -> None:
    forest = BlockTrie(6)
    slot = forest.open_slot()
    forest.store(slot, ABCD, 1)
    assert forest.match(ABCD) == [(4, 1)]
    forest.store(slot, chain("e", "f"), 2)
    assert forest.match(chain("e", "f")) == [(2, 1)]
    forest.store(slot, chain("g"), 3)
    assert forest.match(ABCD) == [(3, 1)]  # used now: older is e/f
    forest.store(slot, chain("h", "i"), 4)
    assert forest.match(chain("e", "f")) == []
    assert forest.match(ABCD) == [(3, 1)]
    assert (len(forest), forest.held(slot)) == (6, 6)
    forest.check_invariants()


def test_many_different_sets_of_holders_are_forgotten_when_unused() -> None:
    forest = BlockTrie(10)
    slots = [forest.open_slot() for _ in range(16)]
    for number in range(40_000):  # each pattern of holders is a set of its own
        flips = (number ^ (number >> 1)) ^ ((number + 1) ^ ((number + 1) >> 1))
        slot = slots[flips.bit_length() - 1]
        if forest.holds(slot, b"k"):
            forest.drop(slot, [b"k"])
        else:
            forest.store(slot, [b"k"], number)
    forest.check_invariants()
    gray = 40_000 ^ (40_000 >> 1)
    assert forest.match([b"k"]) == [(1, gray)]


def test_it_goes_through_a_pickle_and_its_digest_tells_states_apart() -> None:
    index = PrefixIndex(100)
    index.add_instance("a")
    index.apply("a", 1, ABCD, [], snapshot_begin=True, snapshot_end=True)
    index.lengths(ABCD)
    before = index.digest()
    again: PrefixIndex = pickle.loads(pickle.dumps(index))
    assert again.digest() == before
    again.apply("a", 2, [], ABCD[3:])
    assert again.digest() != before
    assert again.lengths(ABCD) == {"a": 3}
    again.check_invariants()


def test_the_bound_is_checked() -> None:
    with pytest.raises(ValueError, match="max_blocks"):
        BlockTrie(0)


NAMES = ("a", "b", "c")
COLD = ("b", "c")
"""Those that tell which of their blocks are on SSD only."""
PATHS = st.lists(st.sampled_from("xyz"), min_size=1, max_size=5).map(lambda names: chain(*names))
KEY_SETS = st.lists(PATHS.map(lambda keys: keys[-1]), max_size=8)
INSTANCES = st.sampled_from(NAMES)


def leading(keys: list[bytes], replica: dict[str, set[bytes]]) -> dict[str, int]:
    """How many leading keys each instance has; those with none are left out."""
    lengths = {
        name: next((at for at, key in enumerate(keys) if key not in held), len(keys)) for name, held in replica.items()
    }
    return {name: length for name, length in lengths.items() if length}


class IndexMachine(RuleBasedStateMachine):
    """The index against sets of keys, under loss, duplicates, removal, cooling, gaps and sweeps of any length."""

    @initialize(limit=st.sampled_from([1 << 20, 40]))
    def begin(self, limit: int) -> None:
        self.limit = limit
        self.index = PrefixIndex(limit)
        self.truth: dict[str, set[bytes]] = {}
        self.warm: dict[str, set[bytes]] = {}
        self.sequence: dict[str, int] = {}
        self.asked: set[bytes] = set()

    @rule(instance=INSTANCES)
    def join(self, instance: str) -> None:
        self.index.add_instance(instance, reports_ssd=instance in COLD)
        self.truth[instance], self.warm[instance], self.sequence[instance] = set(), set(), 0

    @rule(instance=INSTANCES)
    def leave(self, instance: str) -> None:
        self.index.remove_instance(instance)
        self.truth.pop(instance, None)

    @rule(
        instance=INSTANCES,
        parts=st.lists(st.tuples(KEY_SETS, KEY_SETS), min_size=1, max_size=3),
        start=st.integers(1, 50),
    )
    def snapshot(self, instance: str, parts: list[tuple[list[bytes], list[bytes]]], start: int) -> None:
        if instance not in self.truth:
            return
        self.truth[instance], self.warm[instance] = set(), set()
        for number, (part, cooled) in enumerate(parts):
            applied = self.index.apply(
                instance,
                start + number,
                part,
                [],
                cooled,
                snapshot_begin=number == 0,
                snapshot_end=number == len(parts) - 1,
            )
            assert applied is KeyEventResult.DONE
            self.truth[instance] |= set(part)
            self.warm[instance] = (self.warm[instance] | set(part)) - set(cooled)
        assert self.index.synced(instance)
        self.sequence[instance] = start + len(parts)

    @rule(instance=INSTANCES, stored=KEY_SETS, removed=KEY_SETS, cooled=KEY_SETS)
    def change(self, instance: str, stored: list[bytes], removed: list[bytes], cooled: list[bytes]) -> None:
        if self.sequence.get(instance) and instance in self.truth:
            assert self.index.apply(instance, self.sequence[instance], stored, removed, cooled) is KeyEventResult.DONE
            self.truth[instance] = (self.truth[instance] | set(stored)) - set(removed)
            self.warm[instance] = (self.warm[instance] | set(stored)) - set(cooled) - set(removed)
            self.sequence[instance] += 1

    @rule(instance=INSTANCES, path=PATHS)
    def store_chain(self, instance: str, path: list[bytes]) -> None:
        self.change(instance, path, [], [])

    @rule(instance=st.sampled_from(COLD), path=PATHS, cooled=st.integers(1, 5))
    def cool_the_end(self, instance: str, path: list[bytes], cooled: int) -> None:
        self.change(instance, [], [], path[-cooled:])

    @rule(instance=INSTANCES, stored=KEY_SETS, skipped=st.sampled_from([-1, 1, 2, 3]))
    def lose_or_repeat(self, instance: str, stored: list[bytes], skipped: int) -> None:
        if self.sequence.get(instance) and instance in self.truth:
            sequence = self.sequence[instance] + skipped
            assert self.index.apply(instance, sequence, stored, []) is KeyEventResult.RESYNC
            assert self.index.apply(instance, sequence + 1, stored, []) is KeyEventResult.IGNORED
            assert not self.index.synced(instance)
            self.truth[instance], self.warm[instance], self.sequence[instance] = set(), set(), 0

    @rule(instance=INSTANCES, keys=KEY_SETS)
    def miss(self, instance: str, keys: list[bytes]) -> None:
        self.index.forget(instance, keys, self.index.version)
        self.truth.get(instance, set()).difference_update(keys)
        self.warm.get(instance, set()).difference_update(keys)

    @rule(nodes=st.integers(1, 50))
    def sweep(self, nodes: int) -> None:
        self.index.sweep(nodes)

    @rule(keys=PATHS)
    def match(self, keys: list[bytes]) -> None:
        memories = {self.index.memory(instance): instance for instance in self.truth if instance in COLD}
        found = self.index.lengths(keys)
        warm = {
            name: blocks
            for blocks, mask in self.index.match(keys)
            for slot, name in memories.items()
            if mask >> slot & 1
        }
        known = {name: held for name, held in self.warm.items() if name in memories.values()}
        for told, replica in ((found, self.truth), (warm, known)):
            expected = leading(keys, replica)
            if self.limit == 1 << 20:
                assert told == expected
            else:  # what is forgotten for want of room is a miss, never a promise
                assert all(length <= expected[instance] for instance, length in told.items())

    @invariant()
    def agrees(self) -> None:
        self.index.check_invariants()
        for instance, held in self.truth.items():
            count = self.index.held(instance)
            assert count == len(held) if self.limit == 1 << 20 else count <= min(len(held), self.limit)


IndexMachine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=30)
TestIndexMachine = IndexMachine.TestCase


def test_equal_sets_have_one_number() -> None:
    sets = InstanceSets()
    a = sets.add(EMPTY_SET, 3)
    ab = sets.add(a, 70)
    assert sets.add(sets.add(EMPTY_SET, 70), 3) == ab
    assert list(slots_in(sets.masks[ab])) == [3, 70]
    assert sets.remove(ab, 70) == a
    assert sets.remove(a, 70) == a
    assert sets.remove(a, 3) == EMPTY_SET
    assert (sets.common(ab, a), sets.common(a, sets.add(EMPTY_SET, 70)), sets.common(ab, ab)) == (a, EMPTY_SET, ab)
    assert len(sets) == 4
    sets.check_invariants()


def test_transitions_that_were_asked_for_are_looked_up() -> None:
    sets = InstanceSets()
    a = sets.add(EMPTY_SET, 3)
    assert sets.additions(3) == {EMPTY_SET: a}
    assert sets.removals(3) == {}


def test_unused_sets_are_forgotten_and_the_others_numbered_anew() -> None:
    sets = InstanceSets()
    numbers = [sets.add(EMPTY_SET, slot) for slot in range(5)]
    kept = sets.keep([numbers[4], numbers[1]])
    assert kept == {EMPTY_SET: EMPTY_SET, numbers[1]: 1, numbers[4]: 2}
    assert sets.masks == [0, 1 << 1, 1 << 4]
    assert sets.add(EMPTY_SET, 4) == 2
    assert sets.add(EMPTY_SET, 0) == 3
    sets.check_invariants()


def test_ages_keep_the_order_of_use() -> None:
    ages = LruList()
    ages.grow(5)
    assert (ages.oldest, ages.in_order()) == (LRU_END, [])
    for number in (2, 0, 4):
        ages.add(number)
    ages.renew(2)
    ages.renew(2)
    ages.add(3, oldest=True)
    assert ages.in_order() == [3, 0, 4, 2]
    ages.remove(3)
    ages.remove(2)
    ages.remove(0)
    assert (ages.oldest, ages.in_order()) == (4, [4])
    ages.remove(4)
    assert (ages.oldest, ages.in_order()) == (LRU_END, [])
