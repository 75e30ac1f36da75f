"""Records: small values that must outlive conductors, the same at all kvstores and conductors in the end.

A record has a place (kind, tenant, id) and a version; if two claim one place, the higher version is kept, in whatever
order they come (last writer wins). A deleted record stays, empty, until expiry, so that a store that was away does not
bring the record back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moonpool.base.errors import InvalidRequest, Overloaded
from moonpool.base.scheduling.state_machine import Timers
from moonpool.v1 import kv_pb2

MAX_BYTES = 256 << 20
"""Total for one collection's records."""
MAX_RECORD_BYTES = 4 << 20
MESSAGE_BYTES = 2 << 20
"""Bytes at which a message is full: the record that reaches this size is the message's last."""
MAX_NAME_BYTES = 1024
RecordPlace = tuple[str, str, str]


def record_place(record: kv_pb2.Record) -> RecordPlace:
    """A record's place."""
    return record.kind, record.tenant, record.id


class ReplicatedRecords:
    """Records, each with the number of the arrival here; numbers ascend, and have a meaning in this collection only."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._records: dict[RecordPlace, tuple[int, kv_pb2.Record]] = {}  # in the order of their numbers
        self._there: dict[
            tuple[str, str], dict[str, kv_pb2.Record]
        ] = {}  # those not deleted, by kind and tenant, and id
        self._over: Timers[RecordPlace] = Timers()  # when the time of each is over
        self.last = 0
        """The last arrived record's number."""
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def merge(self, records: Iterable[kv_pb2.Record]) -> list[kv_pb2.Record]:
        """Take records; return the records that are newer than what was here.

        Raises:
            InvalidRequest: a record is too large, or has no place.
            Overloaded: all together are too large; none was taken.
        """
        given = sorted(
            map(_check_record, records), key=lambda record: record.version
        )  # of two for a place, the later counts
        newer = {record_place(record): record for record in given if self._is_newer(record)}
        growth = sum(record.ByteSize() - self._size(place) for place, record in newer.items())
        if growth > 0 and self.nbytes + growth > self._max_bytes:
            raise Overloaded("there is no room for more records", reason="records_full", retry_after_s=60.0)
        for place, record in newer.items():
            self._records.pop(place, None)
            self.last += 1
            self._records[place] = self.last, record
            self._over.set(place, record.expires_at)
            self._note(place, record)
        self.nbytes += growth
        return list(newer.values())

    def _note(self, place: RecordPlace, record: kv_pb2.Record | None) -> None:
        """Keep the tenants up to date."""
        kind, tenant, record_id = place
        there = self._there.setdefault((kind, tenant), {})
        there.pop(record_id, None)
        if record is not None and record.value:
            there[record_id] = record
        elif not there:
            del self._there[kind, tenant]

    def _is_newer(self, record: kv_pb2.Record) -> bool:
        found = self._records.get(record_place(record))
        return found is None or record.version > found[1].version

    def _size(self, place: RecordPlace) -> int:
        found = self._records.get(place)
        return 0 if found is None else found[1].ByteSize()

    def after(self, number: int) -> tuple[list[kv_pb2.Record], int, bool]:
        """Records that came after a number, as many as a message holds; the last record's number; whether more follow.

        A number from another collection is valid only if 0.
        """
        found = []
        for came, record in reversed(self._records.values()):
            if came <= number:
                break
            found.append((came, record))
        taken, nbytes = [], 0
        while found and nbytes < MESSAGE_BYTES:
            number, record = found.pop()
            taken.append(record)
            nbytes += record.ByteSize()
        return taken, number, bool(found)

    def get(self, kind: str, tenant: str, record_id: str) -> kv_pb2.Record | None:
        """The record of a place; None without a record, or after deletion."""
        return self._there.get((kind, tenant), {}).get(record_id)

    def of(self, kind: str, tenant: str | None = None) -> Iterator[kv_pb2.Record]:
        """Records by kind, and by tenant if given, without deleted records."""
        for (what, whose), there in list(self._there.items()):
            if what == kind and tenant in (None, whose):
                yield from list(there.values())

    def version(self, place: RecordPlace, now: float) -> int:
        """A version for writing to a place now: nanoseconds since 1970, or later than the version there."""
        found = self._records.get(place)
        return max(int(now * 1e9), 0 if found is None else found[1].version + 1)

    def prune(self, now: float) -> list[kv_pb2.Record]:
        """Forget expired records; return them. Other records cost no time."""
        over = []
        while (place := self._over.pop_due(now)) is not None:
            _, record = self._records.pop(place)
            self._note(place, None)
            self.nbytes -= record.ByteSize()
            over.append(record)
        return over


def _check_record(record: kv_pb2.Record) -> kv_pb2.Record:
    if not record.kind or not record.id:
        raise InvalidRequest("records.id", "a record has a kind and an id")
    if max(len(name.encode()) for name in record_place(record)) > MAX_NAME_BYTES:
        raise InvalidRequest("records.id", f"kind, tenant and id have at most {MAX_NAME_BYTES} bytes each")
    if record.ByteSize() > MAX_RECORD_BYTES:
        raise InvalidRequest("records.value", f"a record has at most {MAX_RECORD_BYTES} bytes")
    return record
