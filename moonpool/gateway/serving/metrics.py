"""Prometheus metrics of a gateway. If vLLM has a metric, the name is vLLM's, so that existing dashboards work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.registry import Collector

from moonpool.base.telemetry.prometheus import SECONDS, PrometheusMetrics
from moonpool.client import ClusterState, GenerateResult

TOKEN_BUCKETS = tuple(float(1 << power) for power in range(0, 18, 2))
E2E_BUCKETS = (*SECONDS, 60.0, 120.0, 300.0, 600.0)
ENGINE = "0"
"""vLLM numbers the engines behind a server. A gateway shows the cluster as one engine."""


class GatewayMetrics:
    """Counters, gauges and histograms of a gateway."""

    def __init__(self, metrics: PrometheusMetrics, clock: Callable[[], float]) -> None:
        """Register in the registry of `metrics`. `clock` returns seconds."""
        self._registry = metrics.registry
        self.clock = clock
        self.open_requests = 0
        """Requests that are being answered."""
        self.waiting = self._gauge(
            "num_requests_waiting", "Requests without a first token; of answers that are not streamed, without a place."
        )
        self.running = self._gauge("num_requests_running", "Requests with an answer under way.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of the prompts of complete requests.")
        self.generated_tokens = self._counter("generation_tokens", "Tokens generated for complete requests.")
        self.cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in caches.")
        self.cache_hits = self._counter("prefix_cache_hits", "Prompt tokens with cached KV.")
        self.ended = self._counter("request_success", "Requests that have ended, by reason.", "finished_reason")
        self.ttft = self._histogram("time_to_first_token_seconds", "Seconds from arrival to the first token.", SECONDS)
        self.gaps = self._histogram(
            "inter_token_latency_seconds", "Seconds between consecutive events of a streamed answer.", SECONDS
        )
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean seconds per token after the first token.", SECONDS
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "Seconds from arrival to the end of the request.", E2E_BUCKETS
        )
        self.queue = self._histogram(
            "request_queue_time_seconds", "Seconds that a request waited before prefill.", SECONDS
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "Seconds that computing the prompt took.", SECONDS
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "Seconds from the first token to the last.", E2E_BUCKETS
        )
        self.prompt_lengths = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKEN_BUCKETS)
        self.answer_lengths = self._histogram("request_generation_tokens", "Tokens of an answer.", TOKEN_BUCKETS)
        self.longest_answers = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest answer of a request.", TOKEN_BUCKETS
        )
        self._refused = Counter(
            "moonpool_gateway_refused",
            "Responses with a status other than 2xx.",
            ["status", "code"],
            registry=self._registry,
        )

    @contextmanager
    def request(self, model: str) -> Iterator[RequestMetrics]:
        """Measure one request while the body of the `with` runs. A request without an end counts as aborted."""
        request_metrics = RequestMetrics(self, model)
        self.open_requests += 1
        try:
            yield request_metrics
        finally:
            self.open_requests -= 1
            request_metrics.close()

    def refused(self, status: int, code: str) -> None:
        """Count an error response."""
        self._refused.labels(str(status), code).inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"vllm:{name}", text, ("model_name", "engine", *labels), registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, ("model_name", "engine"), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", text, ("model_name", "engine"), registry=self._registry, buckets=buckets)


class RequestMetrics:
    """One request's times and counts."""

    def __init__(self, metrics: GatewayMetrics, model: str) -> None:
        self._metrics = metrics
        self._labels = (model, ENGINE)
        self._arrived = metrics.clock()
        self._last = self._arrived
        self._started = self._has_tokens = False
        self._gaps = metrics.gaps.labels(*self._labels)
        self._reason = "abort"
        metrics.waiting.labels(*self._labels).inc()
        metrics.running.labels(*self._labels).inc(0)  # so that the gauge exists from the first request on

    def tokens(self) -> None:
        """Tokens of a streamed answer have arrived."""
        now = self._metrics.clock()
        if self._has_tokens:
            self._gaps.observe(now - self._last)
        else:
            self._has_tokens = True
            self._metrics.ttft.labels(*self._labels).observe(now - self._arrived)
            self.placed()
        self._last = now

    def placed(self) -> None:
        """The request does not wait any more. Of a whole answer, the end tells when the first token came."""
        if not self._started:
            self._started = True
            self._metrics.waiting.labels(*self._labels).dec()
            self._metrics.running.labels(*self._labels).inc()

    def failed(self) -> None:
        self._reason = "error"

    def finished(self, result: GenerateResult) -> None:
        """The answer is complete."""
        metrics, labels, usage = self._metrics, self._labels, result.usage
        self._reason = result.finish_reason
        if not self._has_tokens and usage.completion_tokens:
            metrics.ttft.labels(*labels).observe(result.timing.ttft_s)
        metrics.prompt_tokens.labels(*labels).inc(usage.prompt_tokens)
        metrics.generated_tokens.labels(*labels).inc(usage.completion_tokens)
        metrics.cache_queries.labels(*labels).inc(usage.prompt_tokens)
        metrics.cache_hits.labels(*labels).inc(usage.cached_tokens)
        metrics.prompt_lengths.labels(*labels).observe(usage.prompt_tokens)
        metrics.answer_lengths.labels(*labels).observe(usage.completion_tokens)
        metrics.tpot.labels(*labels).observe(result.timing.tpot_s)
        metrics.queue.labels(*labels).observe(result.timing.queue_s)
        metrics.prefill.labels(*labels).observe(result.timing.prefill_s)
        metrics.decode.labels(*labels).observe(max(0.0, result.timing.e2e_s - result.timing.ttft_s))
        metrics.longest_answers.labels(*labels).observe(
            max((len(choice.token_ids) for choice in result.choices), default=0)
        )

    def close(self) -> None:
        """The request is over."""
        metrics, labels = self._metrics, self._labels
        (metrics.running if self._started else metrics.waiting).labels(*labels).dec()
        metrics.ended.labels(*labels, self._reason).inc()
        metrics.e2e.labels(*labels).observe(metrics.clock() - self._arrived)


class EngineCollector(Collector):
    """An engine's metrics for routers and dashboards, over all decode instances together."""

    def __init__(self, state: Callable[[], ClusterState | None], shown_name: Callable[[ClusterState], str]) -> None:
        """`state` returns the cluster now, or None if the cluster cannot be asked; `shown_name` the model's name."""
        self._state = state
        self._shown_name = shown_name

    def describe(self) -> Iterable[MetricFamily]:
        """Nothing, so that registering makes no query."""
        return []

    def collect(self) -> Iterable[MetricFamily]:
        """The metrics now; without values if the cluster cannot be asked."""
        names, cache = ["model_name", "engine"], ["block_size", "num_gpu_blocks", "enable_prefix_caching", "engine"]
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc",
            "Share of the KV blocks of the decode instances that requests hold, 1 = all.",
            labels=names,
        )
        preemptions = CounterMetricFamily(
            "vllm:num_preemptions", "Preemptions of the decode instances since each one's start.", labels=names
        )
        drafted = CounterMetricFamily(
            "vllm:spec_decode_num_draft_tokens", "Guessed tokens that decode instances checked.", labels=names
        )
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens", "Guessed tokens that were right.", labels=names
        )
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "1; the labels have the KV blocks of the decode instances.", labels=cache
        )
        if state := self._state():
            decodes, labels = (
                [instance for instance in state.instances if instance.kind == "decode"],
                (self._shown_name(state), ENGINE),
            )
            total = sum(instance.total_blocks for instance in decodes)
            kept = sum(instance.free_blocks + instance.cached_blocks for instance in decodes)
            usage.add_metric(labels, max(0.0, 1.0 - kept / total) if total else 0.0)
            preemptions.add_metric(labels, sum(instance.preemptions for instance in decodes))
            drafted.add_metric(labels, sum(instance.draft_tokens for instance in decodes))
            accepted.add_metric(labels, sum(instance.accepted_tokens for instance in decodes))
            config.add_metric((str(state.block_size), str(total), "True", ENGINE), 1.0)
        return usage, preemptions, drafted, accepted, config
