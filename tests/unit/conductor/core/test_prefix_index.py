import pytest

from moonpool.conductor.core.prefix_index import KeyEventResult, PrefixIndex

KEYS = [bytes([n]) * 32 for n in range(8)]


def synced(*instances: str, limit: int = 100) -> PrefixIndex:
    index = PrefixIndex(limit)
    for instance in instances:
        index.add_instance(instance)
        assert index.apply(instance, 1, [], [], snapshot_begin=True, snapshot_end=True) is KeyEventResult.DONE
    return index


def test_longest_consecutive_prefix_of_everyone_in_one_walk() -> None:
    index = synced("a", "b", "c", "d")
    index.apply("a", 2, KEYS[:4], [])
    index.apply("b", 2, KEYS[:2], [])
    index.apply("c", 2, [KEYS[0], KEYS[2], KEYS[3]], [])  # a hole after the first
    index.apply("d", 2, KEYS[1:4], [])  # without its head a chain is useless
    assert index.lengths(KEYS[:4]) == {"a": 4, "b": 2, "c": 1}
    assert index.lengths(KEYS[:1]) == {"a": 1, "b": 1, "c": 1}
    assert index.lengths([]) == {}
    index.check_invariants()


def test_removed_keys_cut_the_prefix_and_unknown_ones_do_no_harm() -> None:
    index = synced("a")
    index.apply("a", 2, KEYS[:3], [])
    index.apply("a", 3, [], [KEYS[1], KEYS[7]])
    assert index.lengths(KEYS[:3]) == {"a": 1}
    assert index.held("a") == 2


def test_a_gap_drops_what_is_known_until_the_next_snapshot() -> None:
    index = synced("a", "b")
    index.apply("a", 2, KEYS[:3], [])
    index.apply("b", 2, KEYS[:1], [])
    assert index.apply("a", 4, [KEYS[3]], []) is KeyEventResult.RESYNC
    assert index.lengths(KEYS) == {"b": 1}
    assert not index.synced("a")
    assert index.apply("a", 5, [KEYS[0]], []) is KeyEventResult.IGNORED
    assert index.apply("a", 6, KEYS[:2], [], snapshot_begin=True) is KeyEventResult.DONE
    assert not index.synced("a")
    assert index.apply("a", 7, [KEYS[2]], [], snapshot_end=True) is KeyEventResult.DONE
    assert index.synced("a")
    assert index.lengths(KEYS) == {"a": 3, "b": 1}
    index.check_invariants()


def test_a_message_that_comes_again_is_no_news() -> None:
    """It may be from before: what it says is not believed, and a snapshot is asked for."""
    index = synced("a", "b")
    index.apply("a", 2, KEYS[:2], [])
    index.apply("a", 3, [], KEYS[1:2])
    assert index.apply("a", 2, KEYS[:2], []) is KeyEventResult.RESYNC
    assert (index.lengths(KEYS), index.synced("a"), index.synced("b")) == ({}, False, True)
    assert index.apply("a", 3, [], KEYS[1:2]) is KeyEventResult.IGNORED
    index.check_invariants()


def test_a_snapshot_replaces_everything_known() -> None:
    index = synced("a")
    index.apply("a", 2, KEYS[:4], [])
    index.apply("a", 3, KEYS[:1], [], snapshot_begin=True, snapshot_end=True)
    assert index.lengths(KEYS) == {"a": 1}
    assert len(index) == 1


def test_before_the_first_snapshot_nothing_is_taken() -> None:
    index = PrefixIndex()
    index.add_instance("a")
    assert index.apply("a", 1, KEYS, []) is KeyEventResult.IGNORED
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
    assert index.lengths(KEYS) == {"c": 2}
    index.check_invariants()


def test_what_turned_out_missing_can_be_forgotten() -> None:
    index = synced("a")
    index.apply("a", 2, KEYS[:3], [])
    index.forget("a", KEYS[1:], index.version)
    index.forget("unknown", KEYS, index.version)
    assert index.lengths(KEYS) == {"a": 1}
    index.apply("a", 3, KEYS[1:2], [])
    assert index.lengths(KEYS) == {"a": 2}


def test_a_key_that_was_reported_after_the_promise_is_not_forgotten() -> None:
    index = synced("a")
    index.apply("a", 2, KEYS[:2], [])
    promised = index.version
    index.apply("a", 3, KEYS[:1], [])  # removed and stored again in between: the net change is "stored"
    index.forget("a", KEYS[:2], promised)
    assert index.lengths(KEYS[:2]) == {"a": 1}
    assert index.held("a") == 1
    index.check_invariants()


def test_who_tells_what_is_cold_has_a_slot_for_what_is_warm() -> None:
    index = synced("a")
    index.add_instance("s", reports_ssd=True)

    def known() -> tuple[int, int]:
        """Leading blocks that it holds, and those in its memory."""
        prefixes = index.match(KEYS)
        slots = index.slot("s"), index.memory("s")
        held, warm = [max([n for n, mask in prefixes if mask >> slot & 1], default=0) for slot in slots]
        index.check_invariants()
        return held, warm

    index.apply("s", 1, KEYS[:5], [], KEYS[3:5], snapshot_begin=True, snapshot_end=True)
    assert known() == (5, 3)
    assert index.lengths(KEYS) == {"s": 5}
    index.apply("s", 2, KEYS[3:4], [], [])
    assert known() == (5, 4)
    index.apply("s", 3, KEYS[5:6], KEYS[4:5], KEYS[2:3])
    assert known() == (4, 2)
    index.forget("s", KEYS[1:2], index.version)
    assert known() == (1, 1)
    index.apply("s", 5, [], [])  # number 4 is missing
    assert known() == (0, 0)
    index.apply("s", 6, KEYS[:2], [], snapshot_begin=True, snapshot_end=True)
    assert known() == (2, 2)
    index.remove_instance("s")
    while index.sweep():
        pass
    assert index.match(KEYS) == []
    index.check_invariants()
