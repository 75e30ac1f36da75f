import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.conductor.index import Applied, PrefixIndex

KEYS = [bytes([n]) * 32 for n in range(8)]


def synced(*instances: str, limit: int = 100) -> PrefixIndex:
    index = PrefixIndex(limit)
    for instance in instances:
        index.add_instance(instance)
        assert index.apply(instance, 1, [], [], snapshot_begin=True, snapshot_end=True) is Applied.DONE
    return index


def test_longest_consecutive_prefix_of_everyone_in_one_walk() -> None:
    index = synced("a", "b", "c", "d")
    index.apply("a", 2, KEYS[:4], [])
    index.apply("b", 2, KEYS[:2], [])
    index.apply("c", 2, [KEYS[0], KEYS[2], KEYS[3]], [])  # a hole after the first
    index.apply("d", 2, KEYS[1:4], [])  # without its head a chain is useless
    assert index.match(KEYS[:4]) == {"a": 4, "b": 2, "c": 1}
    assert index.match(KEYS[:1]) == {"a": 1, "b": 1, "c": 1}
    assert index.match([]) == {}
    index.check_invariants()


def test_removed_keys_cut_the_prefix_and_unknown_ones_do_no_harm() -> None:
    index = synced("a")
    index.apply("a", 2, KEYS[:3], [])
    index.apply("a", 3, [], [KEYS[1], KEYS[7]])
    assert index.match(KEYS[:3]) == {"a": 1}
    assert index.held("a") == 2


def test_a_gap_drops_what_is_known_until_the_next_snapshot() -> None:
    index = synced("a", "b")
    index.apply("a", 2, KEYS[:3], [])
    index.apply("b", 2, KEYS[:1], [])
    assert index.apply("a", 4, [KEYS[3]], []) is Applied.RESYNC
    assert index.match(KEYS) == {"b": 1}
    assert not index.synced("a")
    assert index.apply("a", 5, [KEYS[0]], []) is Applied.IGNORED
    assert index.apply("a", 6, KEYS[:2], [], snapshot_begin=True) is Applied.DONE
    assert not index.synced("a")
    assert index.apply("a", 7, [KEYS[2]], [], snapshot_end=True) is Applied.DONE
    assert index.synced("a")
    assert index.match(KEYS) == {"a": 3, "b": 1}
    index.check_invariants()


def test_a_snapshot_replaces_everything_known() -> None:
    index = synced("a")
    index.apply("a", 2, KEYS[:4], [])
    index.apply("a", 3, KEYS[:1], [], snapshot_begin=True, snapshot_end=True)
    assert index.match(KEYS) == {"a": 1}
    assert len(index) == 1


def test_before_the_first_snapshot_nothing_is_taken() -> None:
    index = PrefixIndex()
    index.add_instance("a")
    assert index.apply("a", 1, KEYS, []) is Applied.IGNORED
    with pytest.raises(KeyError):
        index.apply("b", 1, KEYS, [])


def test_an_instance_leaves_nothing_behind_and_its_bit_is_used_again() -> None:
    index = synced("a", "b")
    index.apply("a", 2, KEYS, [])
    index.remove_instance("a")
    index.remove_instance("a")
    assert len(index) == 0
    index.add_instance("c")
    index.apply("c", 9, KEYS[:2], [], snapshot_begin=True, snapshot_end=True)
    assert index.match(KEYS) == {"c": 2}
    index.check_invariants()


def test_beyond_the_bound_the_oldest_keys_are_forgotten() -> None:
    index = synced("a", limit=3)
    index.apply("a", 2, KEYS[:5], [])
    assert index.held("a") == 3
    assert index.match(KEYS[2:5]) == {"a": 3}
    index.check_invariants()


def test_what_turned_out_missing_can_be_forgotten() -> None:
    index = synced("a")
    index.apply("a", 2, KEYS[:3], [])
    index.forget("a", KEYS[1:], index.version)
    index.forget("unknown", KEYS, index.version)
    assert index.match(KEYS) == {"a": 1}
    index.apply("a", 3, KEYS[1:2], [])
    assert index.match(KEYS) == {"a": 2}


def test_a_key_that_was_reported_after_the_promise_is_not_forgotten() -> None:
    index = synced("a")
    index.apply("a", 2, KEYS[:2], [])
    promised = index.version
    index.apply("a", 3, KEYS[:1], [])  # removed and stored again in between: the net change is "stored"
    index.forget("a", KEYS[:2], promised)
    assert index.match(KEYS[:1]) == {"a": 1}
    assert index.held("a") == 1
    index.check_invariants()


INSTANCES = st.sampled_from(["a", "b", "c"])
KEY_SETS = st.lists(st.sampled_from(KEYS), max_size=6)


class IndexMachine(RuleBasedStateMachine):
    """The index against plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(100)
        self.truth: dict[str, set[bytes]] = {}
        self.sequence: dict[str, int] = {}

    @rule(instance=INSTANCES)
    def join(self, instance: str) -> None:
        self.index.add_instance(instance)
        self.truth[instance] = set()
        self.sequence[instance] = 0

    @rule(instance=INSTANCES)
    def leave(self, instance: str) -> None:
        self.index.remove_instance(instance)
        self.truth.pop(instance, None)

    @rule(instance=INSTANCES, stored=KEY_SETS, start=st.integers(1, 50))
    def snapshot(self, instance: str, stored: list[bytes], start: int) -> None:
        if instance in self.truth:
            self.index.apply(instance, start, stored, [], snapshot_begin=True, snapshot_end=True)
            self.truth[instance] = set(stored)
            self.sequence[instance] = start + 1

    @rule(instance=INSTANCES, stored=KEY_SETS, removed=KEY_SETS)
    def change(self, instance: str, stored: list[bytes], removed: list[bytes]) -> None:
        if self.truth.get(instance) is not None and self.sequence[instance]:
            assert self.index.apply(instance, self.sequence[instance], stored, removed) is Applied.DONE
            self.truth[instance] = (self.truth[instance] | set(stored)) - set(removed)
            self.sequence[instance] += 1

    @rule(instance=INSTANCES, stored=KEY_SETS, skipped=st.integers(1, 3))
    def gap(self, instance: str, stored: list[bytes], skipped: int) -> None:
        if self.truth.get(instance) is not None and self.sequence[instance]:
            assert self.index.apply(instance, self.sequence[instance] + skipped, stored, []) is Applied.RESYNC
            self.truth[instance], self.sequence[instance] = set(), 0

    @invariant()
    def agrees(self) -> None:
        self.index.check_invariants()
        expected = {}
        for instance, keys in self.truth.items():
            length = next((i for i, key in enumerate(KEYS) if key not in keys), len(KEYS))
            if length:
                expected[instance] = length
        assert self.index.match(KEYS) == expected


IndexMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestIndexMachine = IndexMachine.TestCase
