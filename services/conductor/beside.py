"""Which tags and counts of hits belong to a context, so that reading one does not look at all records."""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.cluster.records import RecordBook
from moonpool.v1 import kv_pb2

TAG, HITS = "tag", "hits"
SPARE = 1024
"""So many notes beyond twice those that a sweep left make the next one due."""


class Beside:
    """Notes of the records that lie beside contexts' own, by context.

    A note is checked when it is read: the record may be gone, or the tag another context's. Contexts that nobody reads
    any more are swept when the notes have doubled, so there are never many more notes than records.

    Args:
        book: has the records.
    """

    def __init__(self, book: RecordBook) -> None:
        self._book = book
        self._notes: dict[tuple[str, str], set[tuple[str, str]]] = {}  # kinds and ids, by tenant and context
        self._count = 0
        self._sweep_at = SPARE

    def __len__(self) -> int:
        """Notes."""
        return self._count

    def heard(self, records: Iterable[kv_pb2.Record]) -> None:
        """Notes to which contexts records belong that are in the book now."""
        for record in records:
            if record.kind in (TAG, HITS) and record.value:
                of = record.value.decode() if record.kind == TAG else record.id.partition("/")[0]
                notes = self._notes.setdefault((record.tenant, of), set())
                self._count -= len(notes)
                notes.add((record.kind, record.id))
                self._count += len(notes)
        if self._count > self._sweep_at:
            for place in list(self._notes):
                self.of(*place)
            self._sweep_at = 2 * self._count + SPARE

    def of(self, tenant: str, context_id: str) -> dict[str, list[kv_pb2.Record]]:
        """A context's tags and hits, by kind. Those that are not its own any more are forgotten."""
        notes = self._notes.get((tenant, context_id), set())
        found: dict[str, list[kv_pb2.Record]] = {TAG: [], HITS: []}
        for kind, record_id in list(notes):
            record = self._book.get(kind, tenant, record_id)
            if record is None or (kind == TAG and record.value.decode() != context_id):
                notes.discard((kind, record_id))
                self._count -= 1
            else:
                found[kind].append(record)
        if not notes:
            self._notes.pop((tenant, context_id), None)
        return found
