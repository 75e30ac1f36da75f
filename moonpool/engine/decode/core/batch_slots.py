"""Batch slots: a step has `max_num_seqs`; who takes them, and for whom they are kept."""

from moonpool.engine.decode.core.batch import RunningBatch
from moonpool.engine.decode.core.request import DecodeRequest


class BatchSlots:
    """Counts the batch slots of the next step.

    Args:
        most: slots in a step.
        batch: the running sequences.
        recomputing: requests that recompute: they run then, so their slots are taken.
        loading: prompts that are computed once their prefix is there, alike.

    Attributes:
        kept: slots kept for requests with a promised time between tokens that are not in the batch, by id. A promise
            would be broken by the wait for a slot.
        due: slots that stay free for the holder of the overdue grant, which still waits for blocks.
    """

    def __init__(
        self, most: int, batch: RunningBatch, recomputing: list[DecodeRequest], loading: list[DecodeRequest]
    ) -> None:
        self._most, self._batch, self._recomputing, self._loading = most, batch, recomputing, loading
        self.kept: dict[int, int] = {}
        self.due = 0

    @property
    def num_running(self) -> int:
        """Slots taken."""
        return len(self._batch) + sum(len(request.sequences) for request in self._recomputing) + len(self._loading)

    @property
    def num_kept(self) -> int:
        """Slots kept for promises."""
        return sum(self.kept.values())

    def keep(self, request: DecodeRequest) -> None:
        """Keep slots for a request that is not in the batch, if a time between tokens was promised."""
        if request.tbt_slo_s:
            self.kept[request.id] = request.num_seqs

    def has_room(self, request: DecodeRequest) -> bool:
        """Return whether enough slots are free; those kept for promises count as free."""
        return self.num_running + self.due + len(request.sequences) <= self._most

    def has_room_beside_kept(self, request: DecodeRequest) -> bool:
        """Return whether a request without a promise would leave the kept slots free."""
        return self.num_running + self.due + self.num_kept + len(request.sequences) <= self._most

    def has_room_for_prompt(self, request: DecodeRequest) -> bool:
        """Return whether a single sequence may compute its prompt here; its own kept slot is free for that."""
        return self.num_running + self.num_kept - self.kept.get(request.id, 0) < self._most

    def lacking(self, request: DecodeRequest) -> int:
        """Return the slots that others must leave so that a request can run; those due do not count."""
        kept = 0 if request.tbt_slo_s else self.num_kept  # the kept slots are there for promises
        return self.num_running + kept + len(request.sequences) - self._most

    def check_invariants(self, requests: list[DecodeRequest]) -> None:
        """Assert that slots are kept for each promise outside the batch, and that no step is too large.

        Args:
            requests: those outside the batch that have not ended.
        """
        assert self.kept == {request.id: request.num_seqs for request in requests if request.tbt_slo_s}
        assert self.num_running <= self._most
