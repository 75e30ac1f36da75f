"""Which tags and hits belong to a context, and that what is gone is not remembered."""

from moonpool.cluster.records import ReplicatedRecords
from moonpool.v1 import kv_pb2
from services.conductor.contexts import HITS, SPARE_NOTES, TAG, ContextIndex


class Heard:
    """A book, and what was noted of the records that came."""

    def __init__(self) -> None:
        self.book = ReplicatedRecords()
        self.beside = ContextIndex(self.book)

    def hear(self, kind: str, record_id: str, value: str, version: int = 1) -> None:
        record = kv_pb2.Record(
            kind=kind, tenant="ours", id=record_id, version=version, value=value.encode(), expires_at=1e12
        )
        self.beside.heard(self.book.merge([record]))

    def of(self, context: str) -> dict[str, list[str]]:
        return {kind: [one.id for one in found] for kind, found in self.beside.of("ours", context).items()}


def test_tags_and_hits_are_found_by_their_context() -> None:
    it = Heard()
    it.hear(TAG, "t", "cache-1")
    it.hear(HITS, "cache-1/conductor-0", "counted")
    it.hear("context", "cache-1", "made")
    assert it.of("cache-1") == {TAG: ["t"], HITS: ["cache-1/conductor-0"]}
    assert it.beside.of("theirs", "cache-1") == {TAG: [], HITS: []}
    it.hear(TAG, "t", "cache-2", version=2)
    assert it.of("cache-1") == {TAG: [], HITS: ["cache-1/conductor-0"]}
    assert it.of("cache-2") == {TAG: ["t"], HITS: []}
    assert len(it.beside) == 2


def test_contexts_that_are_gone_and_read_by_nobody_are_forgotten() -> None:
    it = Heard()
    for number in range(2 * SPARE_NOTES + 3):
        context = f"cache-{number}"
        it.hear(HITS, f"{context}/conductor-0", "counted")
        it.hear(HITS, f"{context}/conductor-0", "", version=2)
        assert len(it.beside) <= SPARE_NOTES + 2
    assert len(it.beside) == 1


def test_what_is_there_survives_a_sweep() -> None:
    it = Heard()
    for number in range(2 * SPARE_NOTES):
        it.hear(TAG, f"t{number}", f"cache-{number}")
    assert len(it.beside) == 2 * SPARE_NOTES
    assert it.of("cache-0") == {TAG: ["t0"], HITS: []}
