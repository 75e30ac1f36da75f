"""Net changes of keys."""

import random

import pytest

from moonpool.base.kv.blocks import KeyChanges, NetChanges

A, B, C, D = (bytes([number]) * 32 for number in range(4))


def test_only_what_became_of_a_key_last_is_told() -> None:
    changes = NetChanges()
    changes.note([A, B], [], [B])
    changes.note([C], [A], [D])
    assert len(changes) == 4
    assert changes.take() == KeyChanges([B, C], [A], [B, D])
    assert not changes
    changes.note([], [], [A])
    changes.note([A])
    assert changes.take() == KeyChanges([A], [], [])
    changes.note([A])
    changes.note(cooled=[A])
    changes.note(cooled=[A])
    assert changes.take() == KeyChanges([A], [], [A])
    changes.note([B])
    changes.clear()
    assert changes.take() == KeyChanges([], [], [])


@pytest.mark.parametrize("seed", range(3))
def test_a_listener_knows_what_is_held_and_what_of_it_is_cold(seed: int) -> None:
    """It hears of the oldest changes first, a few at a time."""
    dice, changes = random.Random(seed), NetChanges()
    print(f"seed {seed}")
    keys = [bytes([number]) * 32 for number in range(12)]
    held, cold = set[bytes](), set[bytes]()
    heard, heard_cold = set[bytes](), set[bytes]()
    for step in range(400):
        key = dice.choice(keys)
        if key not in held or (key in cold and dice.random() < 0.5):
            held.add(key)
            cold.discard(key)
            changes.note([key])
        elif dice.random() < 0.5:
            cold.add(key)
            changes.note(cooled=[key])
        else:
            held.remove(key)
            cold.discard(key)
            changes.note(removed=[key])
        stored, removed, cooled = map(set, changes.take(dice.randrange(3) if step < 399 else None))
        assert not stored & removed
        heard = (heard | stored) - removed
        assert cooled <= heard
        heard_cold = (heard_cold - stored - removed) | cooled
    assert (heard, heard_cold) == (held, cold)
