"""What the conductor reports about each request's life."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moonpool.base.telemetry.logs import get_logger
from moonpool.conductor.core.hindsight import Hindsight
from moonpool.conductor.decision_log import DecisionLog
from moonpool.conductor.generate_stream import GenerateStream
from moonpool.conductor.placement.base import PrefillChoice
from moonpool.conductor.prediction_metrics import PredictionMetrics
from moonpool.conductor.recent_requests import RecentRequests
from moonpool.conductor.trace_recording import TraceRecording

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RequestReports:
    """Reports the events of each request's life.

    Attributes:
        decisions: for `Explain`.
        predictions: for the metrics.
        recent: for the cluster's state.
        recording: the trace recording; None if none is wanted.
        hindsight: what placements have lost.
    """

    decisions: DecisionLog
    predictions: PredictionMetrics
    recent: RecentRequests
    recording: TraceRecording | None
    hindsight: Hindsight

    def opened(self, session: GenerateStream) -> None:
        """The core gets a request."""
        if self.recording is not None and session.request.resume is None:
            self.recording.opened(session.request)

    def first_token(self, session: GenerateStream) -> None:
        """The first new token has come."""
        self.decisions.first_token(session.spec.id, session.ttft_s, session.transport)
        if not session.spec.deferred:  # their first tokens come with the last ones
            self.predictions.first_token(session)

    def delivered(self, session: GenerateStream) -> None:
        """The KV has arrived at decode: a short answer may have ended before."""
        if self.decisions.has_ended(session.spec.id):
            self.decisions.ended(session.spec.id, session.timeline(over=True), session.attempts)

    def refused(self, request_id: str, tenant: str, reason: str, candidates: Iterable[PrefillChoice] = ()) -> None:
        """The request is refused, by the core or before reaching the core."""
        log.info("refused", request=request_id, tenant=tenant, reason=reason)
        self.decisions.refused(request_id, tenant, reason, candidates)
        self.recent.add_refused(request_id, tenant, reason)

    def completed(self, session: GenerateStream) -> None:
        """The request is answered; `ended` follows."""
        self.decisions.complete(session.spec.id, session.tpot_s)
        self.predictions.complete(session)
        self.recent.add(session.spec.id, session.timeline(over=True))

    def failed(self, session: GenerateStream, reason: str) -> None:
        """The request has no whole answer, and was neither refused nor cancelled; `ended` follows."""
        self.decisions.unanswered(session.spec.id, failed=reason)
        self.recent.add_unanswered(session.spec.id, session.timeline(over=True), failed=reason)

    def cancelled(self, session: GenerateStream) -> None:
        """The client stopped the request, or left, before the answer was whole; `ended` follows."""
        self.decisions.unanswered(session.spec.id, cancelled=True)
        self.recent.add_unanswered(session.spec.id, session.timeline(over=True), cancelled=True)

    def ended(self, session: GenerateStream) -> None:
        """The core has ended the request."""
        self.decisions.ended(session.spec.id, session.timeline(over=True), session.attempts)
        self.decisions.regretted(session.spec.id, session.number, self.hindsight)
        if self.recording is not None:
            self.recording.ended(session.number, -(-session.tokens // len(session.choices)))
