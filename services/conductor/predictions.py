"""Predicted times beside the measured ones, as histograms of measured / predicted."""

from moonpool.telemetry.metrics import Metrics
from services.conductor.serving import Serving

RATIOS = (0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, 4.0, 8.0)
"""Bucket bounds, finest around 1: the share within 15 % is that between 0.85 and 1.15."""


class Predictions:
    """Observes requests that were placed once: what a second placement foretold began after the request did."""

    def __init__(self, metrics: Metrics) -> None:
        """Registers the histograms."""
        ratio = "measured / predicted, of requests placed once"
        self._ttft = metrics.histogram("ttft_over_predicted", f"time to first token, {ratio}", RATIOS)
        self._tpot = metrics.histogram("tpot_over_predicted", f"mean time between tokens, {ratio}", RATIOS)

    def first_token(self, serving: Serving) -> None:
        """The first token is here."""
        predicted_s = serving.placement.predicted_ttft_s
        if serving.placements == 1 and predicted_s > 0:
            self._ttft.observe(serving.answer.ttft_s / predicted_s)

    def complete(self, serving: Serving) -> None:
        """The answer is complete; one of a single token has no time between tokens."""
        predicted_s, measured_s = serving.placement.predicted_tpot_s, serving.answer.tpot_s
        if serving.placements == 1 and predicted_s > 0 and measured_s > 0:
            self._tpot.observe(measured_s / predicted_s)
