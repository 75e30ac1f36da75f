"""How the last requests were placed, for `Explain`; the oldest decision is dropped first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from moonpool.errors import NotFound
from moonpool.v1 import conductor_pb2
from services.conductor.core.cost import PrefillChoice
from services.conductor.core.messages import Announce


class Decisions:
    """The last `limit` requests' decisions, by request id; all are those of one policy."""

    def __init__(self, limit: int, policy: str) -> None:
        self._limit = limit
        self._policy = policy
        self._records: OrderedDict[str, conductor_pb2.ExplainResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def placed(
        self,
        request_id: str,
        placement: conductor_pb2.Placement,
        candidates: Iterable[PrefillChoice],
        waited_s: float = 0.0,
    ) -> None:
        """Note where a request was placed; a later placement of the same request replaces an earlier one.

        It has looked for a place in vain for `waited_s`.
        """
        explained = map(_explain, candidates)
        record = conductor_pb2.ExplainResponse(placement=placement, candidates=explained, waited_s=waited_s)
        earlier = self._records.get(request_id)
        if earlier is not None:
            record.measured_ttft_s, record.lane = earlier.measured_ttft_s, earlier.lane
        self._keep(request_id, record)

    def refused(self, request_id: str, reason: str, candidates: Iterable[PrefillChoice] = ()) -> None:
        """Note why a request was refused; without new candidates, those of an earlier decision are kept."""
        record = conductor_pb2.ExplainResponse(refused=reason, candidates=map(_explain, candidates))
        earlier = self._records.get(request_id)
        if earlier is not None and not record.candidates:
            record.candidates.extend(earlier.candidates)
        self._keep(request_id, record)

    def first_token(self, request_id: str, ttft_s: float, lane: str) -> None:
        """Note the measured time to first token, once, and the lane on which the prompt's KV goes to decode."""
        record = self._records.get(request_id)
        if record is not None and not record.measured_ttft_s:
            record.measured_ttft_s = ttft_s
            record.lane = lane

    def complete(self, request_id: str, tpot_s: float) -> None:
        """Note the measured mean time between tokens."""
        record = self._records.get(request_id)
        if record is not None:
            record.measured_tpot_s = tpot_s

    def ended(self, request_id: str, timeline: conductor_pb2.Timeline) -> None:
        """Note what a request that is over has gone through."""
        record = self._records.get(request_id)
        if record is not None:
            record.timeline.CopyFrom(timeline)

    def get(self, request_id: str) -> conductor_pb2.ExplainResponse:
        """Return a decision.

        Raises:
            NotFound: no such request, or it is forgotten.
        """
        record = self._records.get(request_id)
        if record is None:
            raise NotFound(f"no decision about request {request_id!r} is known (the last {self._limit} are kept)")
        return record

    def _keep(self, request_id: str, record: conductor_pb2.ExplainResponse) -> None:
        record.policy = self._policy
        self._records[request_id] = record
        self._records.move_to_end(request_id)
        while len(self._records) > self._limit:
            self._records.popitem(last=False)


def placement(told: Announce) -> conductor_pb2.Placement:
    """The contract's form of where a request is placed."""
    plan = told.plan
    return conductor_pb2.Placement(
        prefill=plan.prefill.id,
        decode=told.target.decode if told.target is not None else "",
        kvstore=plan.prefill.source,
        predicted_cached_blocks=plan.prefill.used_blocks,
        predicted_ttft_s=told.waited_s + plan.prefill.ttft_s,
        emulated=plan.emulated,
        predicted_tbt_s=told.pace.tbt_s,
        predicted_tpot_s=told.pace.tpot_s,
    )


def _explain(choice: PrefillChoice) -> conductor_pb2.CandidateExplanation:
    return conductor_pb2.CandidateExplanation(
        instance=choice.id,
        local_blocks=choice.local_blocks,
        used_blocks=choice.used_blocks,
        queue_s=choice.queue_s + choice.later_s,
        load_s=choice.load_s,
        prefill_s=choice.prefill_s,
        excluded=choice.excluded,
        overhead_s=choice.overhead_s,
        source=choice.source,
        cold_blocks=choice.cold_blocks,
    )
