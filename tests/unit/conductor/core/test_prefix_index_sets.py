from services.conductor.core.prefix_index import EMPTY_SET, LRU_END, InstanceSets, LruList, slots_in


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
