"""Deletions are found by what they name."""

from collections.abc import Generator

from moonpool.base.kv.delete_kv import DeletionIndex, KVSelection
from moonpool.base.kv.keys import BlockKey

A, B, N = BlockKey(b"a" * 32), BlockKey(b"b" * 32), b"n" * 32


def test_those_that_concern_some_blocks_are_found() -> None:
    deletions = DeletionIndex()
    deletions.add("key", KVSelection(keys=frozenset([A])))
    deletions.add("tenant", KVSelection(tenants=frozenset(["ours"])))
    deletions.add("namespace", KVSelection(namespaces=frozenset([N])))
    assert deletions.matching([A, B], "ours", N) == ["key", "namespace", "tenant"]
    assert deletions.matching([B], "theirs", bytes(32)) == []
    assert (list(deletions), "key" in deletions, len(deletions)) == (["key", "tenant", "namespace"], True, 3)


def test_one_that_is_forgotten_or_replaced_concerns_nothing() -> None:
    deletions = DeletionIndex()
    deletions.add("d", KVSelection(keys=frozenset([A]), tenants=frozenset(["ours"])))
    deletions.add("d", KVSelection(keys=frozenset([B])))
    assert deletions.matching([A], "ours", N) == []
    assert deletions.matching([B], "", N) == ["d"]
    deletions.remove("d")
    deletions.remove("d")
    assert (deletions.matching([B], "", N), len(deletions)) == ([], 0)


def found_by(looking: Generator[None, None, list[str]]) -> tuple[list[str], int]:
    """What is found, and how many turns others have had."""
    turns = 0
    while True:
        try:
            next(looking)
        except StopIteration as end:
            return end.value, turns
        turns += 1


def test_those_of_keys_with_an_end_are_found() -> None:
    deletions = DeletionIndex()
    deletions.add("both", KVSelection(keys=frozenset([A, B])))
    deletions.add("a", KVSelection(keys=frozenset([A]), tenants=frozenset(["aa"]), namespaces=frozenset([A])))
    for ending, found in ((b"aa", ["both", "a"]), (b"bb", ["both"]), (N, [])):
        assert found_by(deletions.with_ending(ending, 1))[0] == found


def test_keys_with_an_end_are_looked_for_in_portions_while_deletions_come_and_go() -> None:
    many = [BlockKey(number.to_bytes(32, "big")) for number in range(100)]
    deletions = DeletionIndex()
    deletions.add("large", KVSelection(keys=frozenset(many)))
    for number, key in enumerate(many):
        deletions.add(f"small {number}", KVSelection(keys=frozenset([key])))
    for portion, turns in ((10, 20), (100, 2), (150, 1), (1000, 0)):
        assert found_by(deletions.with_ending(b"none", portion)) == ([], turns)
    looking = deletions.with_ending(many[99][-1:], 1)
    next(looking)
    deletions.remove("small 5")
    deletions.add("later", KVSelection(keys=frozenset(many)))
    assert found_by(looking)[0] == ["large", "small 99"]


def test_what_several_name_is_found_as_long_as_one_of_them_is_known() -> None:
    deletions = DeletionIndex()
    for name in ("d", "e", "f"):
        deletions.add(name, KVSelection(keys=frozenset([A, B] if name == "f" else [A])))
    deletions.add("e", KVSelection(keys=frozenset([A])))
    assert deletions.matching([A], "", N) == ["d", "e", "f"]
    for left in (["e", "f"], ["f"], []):
        deletions.remove({2: "d", 1: "e", 0: "f"}[len(left)])
        assert deletions.matching([A, B], "", N) == left


def test_a_union_names_all_that_one_of_them_names() -> None:
    some = [KVSelection(keys=frozenset([A])), KVSelection(frozenset([B]), frozenset(["x"])), KVSelection()]
    assert KVSelection.union(some) == KVSelection(frozenset([A, B]), frozenset(["x"]))
    assert KVSelection.union([]) == KVSelection()
