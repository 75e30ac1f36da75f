"""Prometheus metrics of a gateway, under vLLM's names where vLLM has them, so that existing dashboards work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram

from moonpool.client import GenerateResult
from moonpool.telemetry.metrics import SECONDS, Metrics

TOKEN_BUCKETS = tuple(float(1 << power) for power in range(0, 18, 2))


E2E_BUCKETS = (*SECONDS, 60.0, 120.0, 300.0, 600.0)


class GatewayMetrics:
    """What a gateway counts and times."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        """Add to the registry of `metrics`; `clock` gives seconds."""
        self._registry = metrics.registry
        self.clock = clock
        self.waiting = self._gauge("num_requests_waiting", "requests without a first token")
        self.running = self._gauge("num_requests_running", "requests whose answer has begun")
        self.prompt_tokens = self._counter("prompt_tokens", "tokens of prompts")
        self.generated_tokens = self._counter("generation_tokens", "tokens generated")
        self.cache_queries = self._counter("prefix_cache_queries", "prompt tokens looked up in caches")
        self.cache_hits = self._counter("prefix_cache_hits", "prompt tokens that were not computed anew")
        self.ended = self._counter("request_success", "requests that have ended, by reason", "finished_reason")
        self.ttft = self._histogram("time_to_first_token_seconds", "arrival to first token", SECONDS)
        self.gaps = self._histogram("inter_token_latency_seconds", "between an answer's events", SECONDS)
        self.tpot = self._histogram("request_time_per_output_token_seconds", "mean per further token", SECONDS)
        self.e2e = self._histogram("e2e_request_latency_seconds", "arrival to end", E2E_BUCKETS)
        self.queue = self._histogram("request_queue_time_seconds", "waiting for prefill", SECONDS)
        self.prefill = self._histogram("request_prefill_time_seconds", "prefill", SECONDS)
        self.prompt_lengths = self._histogram("request_prompt_tokens", "tokens of a prompt", TOKEN_BUCKETS)
        self.answer_lengths = self._histogram("request_generation_tokens", "tokens of an answer", TOKEN_BUCKETS)
        self._refused = Counter(
            "moonpool_gateway_refused", "answers other than 2xx", ["status", "code"], registry=self._registry
        )

    @contextmanager
    def request(self, model: str) -> Iterator[RequestMetrics]:
        """Follow one request while the body runs; one that has not finished by then was given up."""
        watch = RequestMetrics(self, model)
        try:
            yield watch
        finally:
            watch.close()

    def refused(self, status: int, code: str) -> None:
        """Count an answer that is an error."""
        self._refused.labels(str(status), code).inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"vllm:{name}", text, ("model_name", *labels), registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, ("model_name",), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", text, ("model_name",), registry=self._registry, buckets=buckets)


class RequestMetrics:
    """One request's times and counts."""

    def __init__(self, meter: GatewayMetrics, model: str) -> None:
        self._meter = meter
        self._model = model
        self._arrived = meter.clock()
        self._last = self._arrived
        self._begun = False
        self._gaps = meter.gaps.labels(model)
        self._reason = "abort"
        meter.waiting.labels(model).inc()
        meter.running.labels(model).inc(0)  # shown from the first request on

    def tokens(self) -> None:
        """New tokens of the answer have come."""
        meter, now = self._meter, self._meter.clock()
        if self._begun:
            self._gaps.observe(now - self._last)
        else:
            self._begun = True
            meter.ttft.labels(self._model).observe(now - self._arrived)
            meter.waiting.labels(self._model).dec()
            meter.running.labels(self._model).inc()
        self._last = now

    def failed(self) -> None:
        """The request was refused or broke."""
        self._reason = "error"

    def finished(self, result: GenerateResult) -> None:
        """The whole answer is there."""
        meter, model, used = self._meter, self._model, result.usage
        self._reason = result.finish_reason
        meter.prompt_tokens.labels(model).inc(used.prompt_tokens)
        meter.generated_tokens.labels(model).inc(used.completion_tokens)
        meter.cache_queries.labels(model).inc(used.prompt_tokens)
        meter.cache_hits.labels(model).inc(used.cached_tokens)
        meter.prompt_lengths.labels(model).observe(used.prompt_tokens)
        meter.answer_lengths.labels(model).observe(used.completion_tokens)
        meter.tpot.labels(model).observe(result.timing.tpot_s)
        meter.queue.labels(model).observe(result.timing.queue_s)
        meter.prefill.labels(model).observe(result.timing.prefill_s)

    def close(self) -> None:
        """The request is over."""
        meter, model = self._meter, self._model
        (meter.running if self._begun else meter.waiting).labels(model).dec()
        meter.ended.labels(model, self._reason).inc()
        meter.e2e.labels(model).observe(meter.clock() - self._arrived)
