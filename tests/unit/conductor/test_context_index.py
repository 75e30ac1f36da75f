"""Which tags and hits belong to a context, and that the index forgets records that are gone."""

from moonpool.base.cluster.records import ReplicatedRecords
from moonpool.conductor.context_index import HITS, SPARE_ENTRIES, TAG, ContextIndex
from moonpool.v1 import kv_pb2


class Indexed:
    """Records, and the index of those that came."""

    def __init__(self) -> None:
        self.records = ReplicatedRecords()
        self.index = ContextIndex(self.records)

    def add(self, kind: str, record_id: str, value: str, version: int = 1) -> None:
        record = kv_pb2.Record(
            kind=kind, tenant="ours", id=record_id, version=version, value=value.encode(), expires_at=1e12
        )
        self.index.add(self.records.merge([record]))

    def of(self, context: str) -> dict[str, list[str]]:
        return {
            kind: [context.id for context in found] for kind, found in self.index.records_of("ours", context).items()
        }


def test_tags_and_hits_are_found_by_their_context() -> None:
    index = Indexed()
    index.add(TAG, "t", "cache-1")
    index.add(HITS, "cache-1/conductor-0", "counted")
    index.add("context", "cache-1", "made")
    assert index.of("cache-1") == {TAG: ["t"], HITS: ["cache-1/conductor-0"]}
    assert index.index.records_of("theirs", "cache-1") == {TAG: [], HITS: []}
    index.add(TAG, "t", "cache-2", version=2)
    assert index.of("cache-1") == {TAG: [], HITS: ["cache-1/conductor-0"]}
    assert index.of("cache-2") == {TAG: ["t"], HITS: []}
    assert len(index.index) == 2


def test_contexts_that_are_gone_leave_the_index_unread() -> None:
    index = Indexed()
    for number in range(2 * SPARE_ENTRIES + 3):
        context = f"cache-{number}"
        index.add(HITS, f"{context}/conductor-0", "counted")
        index.add(HITS, f"{context}/conductor-0", "", version=2)
        assert len(index.index) <= SPARE_ENTRIES + 2
    assert len(index.index) == 1


def test_present_records_survive_a_sweep() -> None:
    index = Indexed()
    for number in range(2 * SPARE_ENTRIES):
        index.add(TAG, f"t{number}", f"cache-{number}")
    assert len(index.index) == 2 * SPARE_ENTRIES
    assert index.of("cache-0") == {TAG: ["t0"], HITS: []}
