from moonpool.cluster import EventLog
from moonpool.v1 import kv_pb2

A, B, C = (bytes([n]) * 32 for n in b"abc")


def test_only_the_last_change_of_a_key_is_told() -> None:
    log = EventLog()
    log.stored([A, B])
    log.removed([A])
    log.stored([C])
    assert log.pending == 3
    assert log.next_message() == kv_pb2.KVEvents(sequence=1, stored_keys=B + C, removed_keys=A)
    assert log.next_message() is None
    log.check_invariants()


def test_messages_are_bounded_and_numbered_without_gaps() -> None:
    log = EventLog()
    log.stored([A, B, C])
    assert log.next_message(max_keys=2) == kv_pb2.KVEvents(sequence=1, stored_keys=A + B)
    assert log.next_message(max_keys=2) == kv_pb2.KVEvents(sequence=2, stored_keys=C)
    assert log.next_sequence == 3


def test_snapshot_replaces_what_is_pending() -> None:
    log = EventLog()
    log.stored([A])
    assert log.snapshot([A, B, C], max_keys=2) == [
        kv_pb2.KVEvents(sequence=1, snapshot_begin=True, stored_keys=A + B),
        kv_pb2.KVEvents(sequence=2, snapshot_end=True, stored_keys=C),
    ]
    assert log.next_message() is None
    assert log.snapshot([]) == [kv_pb2.KVEvents(sequence=3, snapshot_begin=True, snapshot_end=True)]
