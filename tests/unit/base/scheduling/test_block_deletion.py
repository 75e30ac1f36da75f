"""Deleting from a pool: what is chosen loses its key, and what runs keeps none from then on."""

import pytest

from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.scheduling.block_manager import BlockManager, KVOwner
from moonpool.base.scheduling.kv_deletion import DeleteKV, KVDeleted, delete_kv
from tests.unit.base.scheduling.helpers import key

OURS = KVSelection(tenants=frozenset({"ours"}))


def filled() -> tuple[BlockManager, KVOwner, KVOwner]:
    """Blocks 0 and 1 of ours, 2 and 3 of theirs; 0 and 2 are used still, 1 and 3 came at second 10."""
    manager, ours, theirs = BlockManager(6), KVOwner("ours"), KVOwner("theirs")
    manager.allocate(4)
    for block, owner, now in ((0, ours, 0.0), (2, theirs, 0.0), (1, ours, 10.0), (3, theirs, 10.0)):
        manager.now = now
        assert manager.register(block, key(block), owner)
    manager.release([1])
    manager.release([3])
    manager.take_events()
    return manager, ours, theirs


@pytest.mark.parametrize(
    ("event", "gone"),
    [
        (DeleteKV(7, OURS), [0, 1]),
        (DeleteKV(7, KVSelection(keys=frozenset({key(1), key(2), key(9)}))), [1, 2]),
        (DeleteKV(7, KVSelection(), everything=True), [0, 1, 2, 3]),
        (DeleteKV(7, KVSelection(), ttl_s=(("ours", 10.0),)), [0]),
        (DeleteKV(7, KVSelection(), ttl_s=(("ours", 100.0), ("*", 10.0))), [2]),
        (DeleteKV(7, KVSelection()), []),
    ],
)
def test_what_is_chosen_is_found_no_more(event: DeleteKV, gone: list[int]) -> None:
    manager, _, _ = filled()
    manager.now = 11.0
    assert delete_kv(manager, event, ()) == KVDeleted(7, len(gone))
    assert [block for block in range(4) if not manager.match([key(block)])] == gone
    assert sorted(manager.take_events().removed) == sorted(key(block) for block in gone)
    manager.check_invariants()
    manager.release([0, 2])
    assert manager.num_cached == 4 - len(gone)


def test_of_a_request_that_it_concerns_nothing_gets_a_key_any_more() -> None:
    manager, ours, theirs = filled()
    delete_kv(manager, DeleteKV(1, OURS), [(ours, [key(0)]), (theirs, [key(2)])])
    assert (ours.transient, theirs.transient) == (True, False)
    manager.allocate(1)
    assert not manager.register(0, key(0), ours)
    assert manager.register(0, key(0), KVOwner("ours"))  # a request that comes later is another one
    manager.check_invariants()


def test_a_request_with_a_chosen_key_is_concerned_and_one_of_a_time_to_live_is_not() -> None:
    manager, ours, theirs = filled()
    manager.now = 100.0
    requests = [(ours, [key(0)]), (theirs, [key(2), key(5)])]
    delete_kv(manager, DeleteKV(1, KVSelection(), ttl_s=(("*", 1.0),)), requests)
    assert (ours.transient, theirs.transient) == (False, False)
    delete_kv(manager, DeleteKV(2, KVSelection(keys=frozenset({key(5)}))), requests)
    assert (ours.transient, theirs.transient) == (False, True)
