"""Placement decisions, for `Explain`."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable

from moonpool.base import world
from moonpool.base.errors import NotFound
from moonpool.conductor.core.hindsight import Hindsight
from moonpool.conductor.placement.base import PrefillChoice
from moonpool.conductor.proto_conversion import candidate_proto
from moonpool.v1 import conductor_pb2

_GATEWAY_ID = re.compile(r"(.+)-[0-9a-f]{8}")
"""What a gateway makes of a client's `x-request-id`: the id, and digits that make the request's id unique."""


class DecisionLog:
    """Placement decisions of the last `limit` requests, by request id. All decisions come from one policy."""

    def __init__(self, limit: int, policy: str) -> None:
        self._limit = limit
        self._policy = policy
        self._records: OrderedDict[str, conductor_pb2.ExplainResponse] = OrderedDict()
        self._full_ids: dict[str, str] = {}  # by the client's own id

    def __len__(self) -> int:
        return len(self._records)

    def placed(
        self,
        request_id: str,
        attempt: conductor_pb2.Attempt,
    ) -> None:
        """Note where a request was placed; the record tells of the last placement."""
        record = conductor_pb2.ExplainResponse(
            placement=attempt.placement, candidates=attempt.candidates, waited_s=attempt.waited_s
        )
        earlier = self._records.get(request_id)
        if earlier is not None:
            record.measured_ttft_s, record.transport = earlier.measured_ttft_s, earlier.transport
        self._keep(request_id, record)

    def refused(self, request_id: str, tenant: str, reason: str, candidates: Iterable[PrefillChoice] = ()) -> None:
        """Note why a request was refused. Without candidates, those of an earlier decision are kept."""
        record = conductor_pb2.ExplainResponse(
            refused=reason,
            candidates=map(candidate_proto, candidates),
            timeline=conductor_pb2.Timeline(tenant=tenant, arrived_at=world.unix_time()),
        )
        earlier = self._records.get(request_id)
        if earlier is not None and not record.candidates:
            record.candidates.extend(earlier.candidates)
        self._keep(request_id, record)

    def first_token(self, request_id: str, ttft_s: float, transport: str) -> None:
        """Note the first measured time to first token, and the transport of the prompt's KV to decode."""
        record = self._records.get(request_id)
        if record is not None and not record.measured_ttft_s:
            record.measured_ttft_s = ttft_s
            record.transport = transport

    def complete(self, request_id: str, tpot_s: float) -> None:
        """Note the measured mean time between tokens."""
        record = self._records.get(request_id)
        if record is not None:
            record.measured_tpot_s = tpot_s

    def unanswered(self, request_id: str, *, failed: str = "", cancelled: bool = False) -> None:
        """Note why a request that was not refused has no whole answer. The request may never have been placed."""
        if request_id not in self._records:
            self._keep(request_id, conductor_pb2.ExplainResponse())
        record = self._records[request_id]
        record.failed, record.cancelled = failed, cancelled

    def ended(
        self, request_id: str, timeline: conductor_pb2.Timeline, attempts: Iterable[conductor_pb2.Attempt]
    ) -> None:
        """Note timeline and placements of a request that is over."""
        record = self._records.get(request_id)
        if record is not None:
            record.timeline.CopyFrom(timeline)
            del record.attempts[:]
            record.attempts.extend(attempts)

    def regretted(self, request_id: str, number: int, hindsight: Hindsight) -> None:
        """Note what the placement of a request, by number, has lost."""
        record = self._records.get(request_id)
        if record is None:
            return
        if (regret := hindsight.prefill.of(number)) is not None:
            record.regret_s, record.better = regret.lost_s, regret.better
        if (regret := hindsight.decode.of(number)) is not None:
            record.decode_regret_s, record.better_decode = regret.lost_s, regret.better

    def has_ended(self, request_id: str) -> bool:
        """Return whether the timeline of a request is known."""
        record = self._records.get(request_id)
        return record is not None and record.HasField("timeline")

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
        return record

    def _keep(self, request_id: str, record: conductor_pb2.ExplainResponse) -> None:
        record.policy = self._policy
        self._records[request_id] = record
        self._records.move_to_end(request_id)
        if found := _GATEWAY_ID.fullmatch(request_id):
            self._full_ids[found[1]] = request_id
        while len(self._records) > self._limit:
            gone, _ = self._records.popitem(last=False)
            found = _GATEWAY_ID.fullmatch(gone)
            if found and self._full_ids.get(found[1]) == gone:
                del self._full_ids[found[1]]
