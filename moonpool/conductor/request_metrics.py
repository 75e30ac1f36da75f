"""How requests went, for Prometheus: histograms of their times, and counters of how they ended."""

from __future__ import annotations

from moonpool.base.telemetry.prometheus import LONG_SECONDS, SECONDS, PrometheusMetrics
from moonpool.conductor.core.failures import NO_DECODE_ROOM, Failure, FailureKind
from moonpool.conductor.generate_stream import GenerateStream
from moonpool.conductor.prediction_metrics import PredictionMetrics

OWN, LOADED, COMPUTED = "own", "loaded", "computed"
"""Where the KV of a prompt's tokens came from; see `prompt_tokens`."""

REASONS = ("queue_full", "ttft_slo", "tbt_slo", NO_DECODE_ROOM, "unavailable", "invalid")
"""Reasons that are exported from the start; budgets have further ones."""


class EndedRequests:
    """Observes each request at the first token and at the end."""

    def __init__(self, metrics: PrometheusMetrics) -> None:
        """Register in the registry of `metrics`."""
        self._predictions = PredictionMetrics(metrics)
        self._ttft = metrics.histogram("ttft_seconds", "Seconds from arrival to the first token.", SECONDS)
        self._tpot = metrics.histogram("tpot_seconds", "Mean seconds per further token of an answer.", SECONDS)
        self._e2e = metrics.histogram("e2e_seconds", "Seconds from arrival to the end of a whole answer.", LONG_SECONDS)
        self._queue = metrics.histogram(
            "queue_seconds", "Seconds that an answered request waited for the first placement.", LONG_SECONDS
        )
        self._transfer_tail = metrics.histogram(
            "transfer_tail_seconds", "Seconds from the first token until all KV was at decode.", SECONDS
        )
        self._refused = metrics.counter("refused", "Requests that were refused, by reason.", ["reason"])
        self._failed = metrics.counter(
            "failed", "Requests that had a placement and no whole answer, by kind of the failure.", ["kind"]
        )
        for kind in FailureKind:  # so that a rate over the first failure is known
            self._failed.labels(kind.name.lower())
        for reason in REASONS:
            self._refused.labels(reason)
        self._cancelled = metrics.counter("cancelled", "Requests that clients stopped, or left.", [])
        self._prompt_tokens = metrics.counter(
            "prompt_tokens",
            "Prompt tokens of answered requests by where the KV came from: the pool of the computing instance (own), "
            "kvstores and other instances (loaded), or compute (computed).",
            ["source"],
        )

    def first_token(self, stream: GenerateStream) -> None:
        """Observe the time to first token."""
        self._ttft.observe(stream.ttft_s)
        self._predictions.first_token(stream)

    def complete(self, stream: GenerateStream) -> None:
        """Observe a request that is answered."""
        self._predictions.complete(stream)
        history = stream.history
        if stream.tpot_s:
            self._tpot.observe(stream.tpot_s)
        self._e2e.observe(history.since_arrival_s)
        if history.attempts:
            self._queue.observe(history.attempts[0].waited_s)
        loaded = history.loaded_tokens
        for source, tokens in (
            (OWN, history.cached_tokens - loaded),
            (LOADED, loaded),
            (COMPUTED, len(stream.request.prompt) - history.cached_tokens),
        ):
            self._prompt_tokens.labels(source).inc(tokens)

    def delivered(self, tail_s: float) -> None:
        """Observe how much later than the first token the KV was at decode."""
        self._transfer_tail.observe(tail_s)

    def refused(self, reason: str) -> None:
        """Count a request that was refused for this reason."""
        self._refused.labels(reason).inc()

    def failed(self, kind: FailureKind) -> None:
        """Count a request that failed with a placement."""
        self._failed.labels(kind.name.lower()).inc()

    def cancelled(self) -> None:
        """Count a request that the client stopped or left."""
        self._cancelled.inc()


def refusal_reason(failure: Failure) -> str:
    """The reason under which a refusal of the core counts."""
    return failure.reason or failure.kind.name.lower()
