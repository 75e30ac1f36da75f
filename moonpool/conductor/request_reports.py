"""What the conductor reports about each request's life."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moonpool.base.telemetry.logs import get_logger
from moonpool.conductor.core.failures import FailureKind
from moonpool.conductor.core.hindsight import Hindsight
from moonpool.conductor.decision_log import DecisionLog
from moonpool.conductor.generate_stream import GenerateStream
from moonpool.conductor.placement.base import PrefillChoice
from moonpool.conductor.recent_requests import RecentRequests
from moonpool.conductor.request_metrics import EndedRequests
from moonpool.conductor.trace_recording import TraceRecording

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RequestReports:
    """Reports of the events of each request's life.

    Attributes:
        decisions: for `Explain`.
        metrics: for Prometheus.
        recent: for the cluster's state.
        recording: the trace recording; None if none is wanted.
        hindsight: what placements have lost.
    """

    decisions: DecisionLog
    metrics: EndedRequests
    recent: RecentRequests
    recording: TraceRecording | None
    hindsight: Hindsight

    def opened(self, stream: GenerateStream) -> None:
        if self.recording is not None and stream.request.resume is None:
            self.recording.opened(stream.request)

    def first_token(self, stream: GenerateStream) -> None:
        """The first new token has come."""
        self.decisions.first_token(stream.spec.id, stream.ttft_s, stream.history.transport)
        if not stream.spec.deferred:  # their first tokens come with the last ones
            self.metrics.first_token(stream)

    def delivered(self, stream: GenerateStream) -> None:
        """The KV has arrived at decode: a short answer may have ended before."""
        if stream.history.attempts:
            self.metrics.delivered(stream.history.attempts[-1].transfer_tail_s)
        if self.decisions.has_ended(stream.spec.id):
            self.decisions.ended(stream.spec.id, stream.timeline(over=True), stream.history.attempts)

    def refused(
        self, request_id: str, tenant: str, reason: str, message: str, candidates: Iterable[PrefillChoice] = ()
    ) -> None:
        """The request is refused, by the core or before reaching the core; `reason` is machine-readable."""
        log.info("refused", request=request_id, tenant=tenant, reason=message, code=reason)
        self.metrics.refused(reason)
        self.decisions.refused(request_id, tenant, message, candidates)
        self.recent.add_refused(request_id, tenant, message)

    def completed(self, stream: GenerateStream) -> None:
        """The request is answered; `ended` follows."""
        self.decisions.complete(stream.spec.id, stream.tpot_s)
        self.metrics.complete(stream)
        self.recent.add(stream.spec.id, stream.spec.tenant, stream.finished)

    def failed(self, stream: GenerateStream, kind: FailureKind, reason: str) -> None:
        """The request has no whole answer, and was neither refused nor cancelled; `ended` follows."""
        log.info("failed", request=stream.spec.id, tenant=stream.spec.tenant, kind=kind.name.lower(), reason=reason)
        self.metrics.failed(kind)
        self.decisions.unanswered(stream.spec.id, failed=reason)
        self.recent.add_unanswered(stream.spec.id, stream.timeline(over=True), failed=reason)

    def cancelled(self, stream: GenerateStream) -> None:
        """The client stopped the request, or left, before the answer was whole; `ended` follows."""
        self.metrics.cancelled()
        self.decisions.unanswered(stream.spec.id, cancelled=True)
        self.recent.add_unanswered(stream.spec.id, stream.timeline(over=True), cancelled=True)

    def ended(self, stream: GenerateStream) -> None:
        """The core has ended the request."""
        self.decisions.ended(stream.spec.id, stream.timeline(over=True), stream.history.attempts)
        self.decisions.regretted(stream.spec.id, stream.number, self.hindsight)
        if self.recording is not None:
            self.recording.ended(stream.number, -(-stream.tokens // len(stream.choices)))
