"""Which tags and hit counts belong to a context, among the records that conductors share."""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.base.cluster.records import ReplicatedRecords
from moonpool.v1 import kv_pb2

TAG, HITS = "tag", "hits"
"""Kinds of records: the context's tags; each conductor's hits."""
SPARE_ENTRIES = 1024
"""The index is swept at this many entries more than twice the number left by the last sweep."""
ContextKey = tuple[str, str]
"""A context's tenant and id."""


class ContextIndex:
    """Tags and hit counts by context: keys of records with these kinds.

    An entry is checked on reading: the record may be gone, or the tag may belong to another context now. All entries
    are swept when they have doubled, so there are never many more entries than records.

    Args:
        records: the shared records.
    """

    def __init__(self, records: ReplicatedRecords) -> None:
        self._records = records
        self._entries: dict[ContextKey, dict[tuple[str, str], None]] = {}  # kinds and ids of records
        self._count = 0
        self._sweep_at = SPARE_ENTRIES

    def __len__(self) -> int:
        """Number of entries."""
        return self._count

    def add(self, records: Iterable[kv_pb2.Record]) -> None:
        """Add the tags and hit counts among some new records."""
        for record in records:
            if record.kind in (TAG, HITS) and record.value:
                context_id = record.value.decode() if record.kind == TAG else record.id.partition("/")[0]
                entries = self._entries.setdefault((record.tenant, context_id), {})
                self._count -= len(entries)
                entries[record.kind, record.id] = None
                self._count += len(entries)
        if self._count > self._sweep_at:
            for key in list(self._entries):
                self.records_of(*key)
            self._sweep_at = 2 * self._count + SPARE_ENTRIES

    def records_of(self, tenant: str, context_id: str) -> dict[str, list[kv_pb2.Record]]:
        """A context's tags and hit counts, by kind. Outdated entries are dropped."""
        entries = self._entries.get((tenant, context_id), {})
        found: dict[str, list[kv_pb2.Record]] = {TAG: [], HITS: []}
        for kind, record_id in list(entries):
            record = self._records.get(kind, tenant, record_id)
            if record is None or (kind == TAG and record.value.decode() != context_id):
                del entries[kind, record_id]
                self._count -= 1
            else:
                found[kind].append(record)
        if not entries:
            self._entries.pop((tenant, context_id), None)
        return found
