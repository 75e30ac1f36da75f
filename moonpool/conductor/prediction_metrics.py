"""How well latency was predicted, as histograms."""

from __future__ import annotations

from moonpool.base.telemetry.prometheus import PrometheusMetrics
from moonpool.conductor.generate_stream import GenerateStream

RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, 4.0, 8.0)
"""Bucket bounds, finest around 1: the share within 15 % is that between 0.85 and 1.15."""


class PredictionMetrics:
    """Histograms of measured over predicted latency, for requests placed once.

    A second placement's prediction begins after the request's arrival, so the prediction is not comparable.
    """

    def __init__(self, metrics: PrometheusMetrics) -> None:
        ratio = "measured / predicted, of requests that were placed once."
        self._ttft = metrics.histogram("ttft_over_predicted", f"Time to first token, {ratio}", RATIO_BUCKETS)
        self._tpot = metrics.histogram("tpot_over_predicted", f"Time per output token, {ratio}", RATIO_BUCKETS)

    def first_token(self, stream: GenerateStream) -> None:
        """Observe the time to first token."""
        predicted_s = stream.placement.predicted_ttft_s
        if stream.placements == 1 and predicted_s > 0:
            self._ttft.observe(stream.ttft_s / predicted_s)

    def complete(self, stream: GenerateStream) -> None:
        """Observe the mean time between tokens, if there are two tokens."""
        predicted_s, measured_s = stream.placement.predicted_tpot_s, stream.tpot_s
        if stream.placements == 1 and predicted_s > 0 and measured_s > 0:
            self._tpot.observe(measured_s / predicted_s)
