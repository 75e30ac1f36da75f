"""Records: the later write wins, whatever clocks say, and what is over is forgotten."""

from moonpool.base.cluster.records import ReplicatedRecords
from moonpool.v1 import kv_pb2

HOUR = 3600.0


def write(book: ReplicatedRecords, now: float, value: bytes, expires_at: float = 1e12) -> kv_pb2.Record:
    """What a conductor writes that knows the records of a book, at a time by its own clock."""
    version = book.version(("kind", "ours", "a"), now)
    record = kv_pb2.Record(kind="kind", tenant="ours", id="a", version=version, value=value, expires_at=expires_at)
    book.merge([record])
    return record


def value_of(book: ReplicatedRecords) -> bytes | None:
    found = book.get("kind", "ours", "a")
    return None if found is None else found.value


def test_who_knows_of_a_record_replaces_it_although_its_clock_is_an_hour_behind() -> None:
    fast, slow = ReplicatedRecords(), ReplicatedRecords()
    first = write(fast, 10 * HOUR, b"first")
    slow.merge([first])
    second = write(slow, 9 * HOUR, b"second")
    assert second.version > first.version
    fast.merge([second])
    assert (value_of(fast), value_of(slow)) == (b"second", b"second")
    fast.merge([first])  # it comes again, late
    assert value_of(fast) == b"second"
    gone = write(slow, 9 * HOUR, b"")
    fast.merge([gone])
    fast.merge([second])
    assert (value_of(fast), value_of(slow)) == (None, None), "who was away does not bring it back"


def test_two_that_do_not_know_of_each_other_agree_in_the_end() -> None:
    books = ReplicatedRecords(), ReplicatedRecords()
    written = [
        write(book, now, value) for book, now, value in zip(books, (10 * HOUR, 9 * HOUR), (b"x", b"y"), strict=True)
    ]
    for book in books:
        book.merge(reversed(written))
    assert [value_of(book) for book in books] == [b"x", b"x"], "the later clock"


def test_what_is_over_is_forgotten_also_when_its_time_was_changed() -> None:
    book = ReplicatedRecords()
    write(book, 1.0, b"short", expires_at=10.0)
    write(book, 2.0, b"longer", expires_at=20.0)
    assert book.prune(15.0) == []
    assert [record.value for record in book.prune(20.0)] == [b"longer"]
    assert (len(book), book.nbytes, value_of(book), book.prune(1e9)) == (0, 0, None, [])
