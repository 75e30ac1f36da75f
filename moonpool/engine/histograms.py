"""Histograms of a prefill or decode instance."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Histogram

from moonpool.base.scheduling.steps import ENCODER, MEMORY, STORE, PlacedPicture
from moonpool.base.telemetry.prometheus import SECONDS, PrometheusMetrics

COUNTS = tuple(float(1 << power) for power in range(0, 17, 2))
"""Bucket bounds for sequences and tokens of a step."""

PEER, KVSTORE = "peer", "kvstore"
"""Kinds of sources of KV."""


class EngineHistograms:
    """How long steps, loads and sends take, and how large steps are.

    Attributes:
        step_s: seconds of a step.
        sequences: sequences in a step.
        tokens: tokens that a step computes.
        load_s: seconds of a load, by kind of the source: "peer" or "kvstore".
        picture_s: seconds until a picture's rows were there, by source: "encoder", "memory" or "kvstore".
        send_s: seconds in which pieces of a prompt's KV were handed to the transport.
    """

    def __init__(self, metrics: PrometheusMetrics, role: str) -> None:
        """Register in the registry of `metrics`, under the name of a role."""

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return metrics.histogram(name, text, buckets, labels, service=role)

        self.step_s = histogram("step_seconds", "Seconds of a step.", SECONDS)
        self.sequences = histogram("step_sequences", "Sequences in a step.", COUNTS)
        self.tokens = histogram("step_tokens", "Tokens that a step computes.", COUNTS)
        self.load_s = histogram(
            "load_seconds", "Seconds of a load of KV, by kind of the source: `peer` or `kvstore`.", SECONDS, "source"
        )
        for source in (PEER, KVSTORE):  # so that a query has data before the first load
            self.load_s.labels(source)
        self.picture_s = histogram(
            "picture_seconds",
            "Seconds of a step until the rows of a picture were there, by source: `encoder`; `memory`, which keeps "
            "rows of pictures that come again; `kvstore`, from which rows come with the step.",
            SECONDS,
            "source",
        )
        for source in (ENCODER, MEMORY, STORE):
            self.picture_s.labels(source)
        self.send_s = histogram(
            "send_seconds", "Seconds in which pieces of a prompt's KV were handed to the transport.", SECONDS
        )

    def pictures(self, placed: Sequence[PlacedPicture]) -> None:
        """Observe the pictures of a step."""
        for picture in placed:
            self.picture_s.labels(picture.source).observe(picture.ns / 1e9)

    def step(self, seconds: float, sequences: int, tokens: int) -> None:
        """Observe a step."""
        self.step_s.observe(seconds)
        self.sequences.observe(sequences)
        self.tokens.observe(tokens)
