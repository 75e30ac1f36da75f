"""Placement decisions, for `Explain`."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moonpool.base import world
from moonpool.base.errors import NotFound
from moonpool.conductor.core.hindsight import Hindsight
from moonpool.conductor.placement.base import PrefillChoice
from moonpool.conductor.proto_conversion import candidate_proto
from moonpool.v1 import conductor_pb2

_GATEWAY_ID = re.compile(r"(.+)-[0-9a-f]{8}")
"""What a gateway makes of a client's `x-request-id`: the id, and digits that make the request's id unique."""


@dataclass(slots=True)
class _Decision:
    """What is known of a request; the parts are put together when somebody asks.

    Attributes:
        facts: all that is no part of its own.
        placed: the last placement; None = refused, or never placed.
        candidates: of a refused request.
        timeline: what the request has gone through, once over.
        attempts: all placements, once over.
    """

    facts: conductor_pb2.ExplainResponse
    placed: conductor_pb2.Attempt | None = None
    candidates: Sequence[conductor_pb2.CandidateExplanation] = ()
    timeline: conductor_pb2.Timeline | None = None
    attempts: Sequence[conductor_pb2.Attempt] = ()

    def told(self) -> conductor_pb2.ExplainResponse:
        response = conductor_pb2.ExplainResponse(
            timeline=self.timeline, candidates=self.all_candidates, attempts=self.attempts
        )
        if self.placed is not None:
            response.placement.CopyFrom(self.placed.placement)
            response.waited_s = self.placed.waited_s
        response.MergeFrom(self.facts)
        return response

    @property
    def all_candidates(self) -> Sequence[conductor_pb2.CandidateExplanation]:
        return self.candidates if self.placed is None else self.placed.candidates


class DecisionLog:
    """Placement decisions of the last `limit` requests, by request id. All decisions come from one policy."""

    def __init__(self, limit: int, policy: str) -> None:
        self._limit = limit
        self._policy = policy
        self._records: OrderedDict[str, _Decision] = OrderedDict()
        self._full_ids: dict[str, str] = {}  # by the client's own id

    def __len__(self) -> int:
        return len(self._records)

    def placed(
        self,
        request_id: str,
        attempt: conductor_pb2.Attempt,
    ) -> None:
        """Note where a request was placed; the record tells of the last placement."""
        facts, earlier = conductor_pb2.ExplainResponse(), self._records.get(request_id)
        if earlier is not None:
            facts.measured_ttft_s, facts.transport = earlier.facts.measured_ttft_s, earlier.facts.transport
        self._keep(request_id, _Decision(facts, attempt))

    def refused(self, request_id: str, tenant: str, reason: str, candidates: Iterable[PrefillChoice] = ()) -> None:
        """Note why a request was refused. Without candidates, those of an earlier decision are kept."""
        found, earlier = tuple(map(candidate_proto, candidates)), self._records.get(request_id)
        if earlier is not None and not found:
            found = tuple(earlier.all_candidates)
        timeline = conductor_pb2.Timeline(tenant=tenant, arrived_at=world.unix_time())
        facts = conductor_pb2.ExplainResponse(refused=reason)
        self._keep(request_id, _Decision(facts, candidates=found, timeline=timeline))

    def first_token(self, request_id: str, ttft_s: float, transport: str) -> None:
        """Note the first measured time to first token, and the transport of the prompt's KV to decode."""
        record = self._records.get(request_id)
        if record is not None and not record.facts.measured_ttft_s:
            record.facts.measured_ttft_s = ttft_s
            record.facts.transport = transport

    def complete(self, request_id: str, tpot_s: float) -> None:
        """Note the measured mean time between tokens."""
        record = self._records.get(request_id)
        if record is not None:
            record.facts.measured_tpot_s = tpot_s

    def unanswered(self, request_id: str, *, failed: str = "", cancelled: bool = False) -> None:
        """Note why a request that was not refused has no whole answer. The request may never have been placed."""
        if request_id not in self._records:
            self._keep(request_id, _Decision(conductor_pb2.ExplainResponse()))
        facts = self._records[request_id].facts
        facts.failed, facts.cancelled = failed, cancelled

    def ended(
        self, request_id: str, timeline: conductor_pb2.Timeline, attempts: Sequence[conductor_pb2.Attempt]
    ) -> None:
        """Note timeline and placements of a request that is over."""
        record = self._records.get(request_id)
        if record is not None:
            record.timeline, record.attempts = timeline, attempts

    def regretted(self, request_id: str, number: int, hindsight: Hindsight) -> None:
        """Note what the placement of a request, by number, has lost."""
        record = self._records.get(request_id)
        if record is None:
            return
        if (regret := hindsight.prefill.of(number)) is not None:
            record.facts.regret_s, record.facts.better = regret.lost_s, regret.better
        if (regret := hindsight.decode.of(number)) is not None:
            record.facts.decode_regret_s, record.facts.better_decode = regret.lost_s, regret.better

    def has_ended(self, request_id: str) -> bool:
        """Return whether the timeline of a request is known."""
        record = self._records.get(request_id)
        return record is not None and record.timeline is not None

    def full_id(self, request_id: str) -> str:
        """The id of the last request with the client's own `x-request-id`; a request's id stays as given."""
        return request_id if request_id in self._records else self._full_ids.get(request_id, request_id)

    def get(self, request_id: str) -> conductor_pb2.ExplainResponse:
        """Return the decision about a request.

        Raises:
            NotFound: the request is not known, or no longer.
        """
        record = self._records.get(self.full_id(request_id))
        if record is None:
            raise NotFound(f"no decision about request {request_id!r} is known (the last {self._limit} are kept)")
        return record.told()

    def _keep(self, request_id: str, record: _Decision) -> None:
        record.facts.policy = self._policy
        self._records[request_id] = record
        self._records.move_to_end(request_id)
        if found := _GATEWAY_ID.fullmatch(request_id):
            self._full_ids[found[1]] = request_id
        while len(self._records) > self._limit:
            gone, _ = self._records.popitem(last=False)
            found = _GATEWAY_ID.fullmatch(gone)
            if found and self._full_ids.get(found[1]) == gone:
                del self._full_ids[found[1]]
