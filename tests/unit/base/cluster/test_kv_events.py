from moonpool.base.cluster import HeldKeys, KVEventLog
from moonpool.base.cluster.kv_events import snapshot_messages
from moonpool.v1 import kv_pb2

A, B, C, D, E, F = (bytes([n]) * 32 for n in b"abcdef")


def test_only_the_last_change_of_a_key_is_told() -> None:
    log = KVEventLog()
    log.note([A, B])
    log.note(removed=[A])
    log.note([C])
    assert log.pending == 3
    assert log.next_message() == kv_pb2.KVEvents(sequence=1, stored_keys=B + C, removed_keys=A)
    assert log.next_message() is None


def test_messages_are_bounded_and_numbered_without_gaps() -> None:
    log = KVEventLog()
    log.note([A, B, C])
    assert log.next_message(max_keys=2) == kv_pb2.KVEvents(sequence=1, stored_keys=A + B)
    assert log.next_message(max_keys=2) == kv_pb2.KVEvents(sequence=2, stored_keys=C)
    assert log.next_sequence == 3


def test_a_snapshot_comes_in_steps_that_list_when_they_are_taken() -> None:
    held, log = [[A], [B, C, D], [E]], KVEventLog()
    log.note([A])
    steps = snapshot_messages(HeldKeys(3, held.__getitem__), max_keys=2)
    log.forget()
    assert log.next_message() is None
    assert list(log.numbered(next(steps))) == [
        kv_pb2.KVEvents(sequence=1, snapshot_begin=True, stored_keys=A + B),
        kv_pb2.KVEvents(sequence=2, stored_keys=C + D),
    ]
    log.note([F])
    held[2] = [E, F]
    assert log.next_message() == kv_pb2.KVEvents(sequence=3, stored_keys=F)
    assert list(log.numbered(next(steps))) == [kv_pb2.KVEvents(sequence=4, snapshot_end=True, stored_keys=E + F)]
    assert next(steps, None) is None


def test_the_snapshot_of_an_empty_instance_begins_and_ends() -> None:
    assert list(snapshot_messages(HeldKeys(2, lambda number: []))) == [
        [kv_pb2.KVEvents(snapshot_begin=True, snapshot_end=True)]
    ]
