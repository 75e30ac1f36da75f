"""Prometheus metrics of a gateway. If vLLM has a metric, the name is vLLM's, so that existing dashboards work."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.registry import Collector

from moonpool.base import world
from moonpool.base.telemetry.prometheus import LONG_SECONDS, SECONDS, PrometheusMetrics
from moonpool.client import ClusterState, GenerateResult
from moonpool.gateway.serving.served_request import ServedRequest

TOKEN_BUCKETS = tuple(float(1 << power) for power in range(0, 18, 2))
MetricT = TypeVar("MetricT", Counter, Gauge, Histogram)
ENGINE = "0"
"""vLLM numbers the engines behind a server. A gateway shows the cluster as one engine."""
ANSWERS_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
"""Bucket bounds for the answers that a request wants."""


@dataclass(frozen=True, slots=True)
class AskedFor:
    """What a generating request asks for.

    Attributes:
        model: the model's name in metrics.
        lora: the LoRA adapter; "" for none.
        answers: answers to each prompt.
        max_tokens: limit for the tokens of an answer.
    """

    model: str
    lora: str = ""
    answers: int = 1
    max_tokens: int = 0


class HttpMetrics:
    """All HTTP requests by the gateway's paths, under the names of vLLM's server."""

    def __init__(self, metrics: PrometheusMetrics) -> None:
        """Register in the registry of `metrics`."""
        self._requests = Counter(
            "http_requests",
            "HTTP requests by path and status class; a request whose client left before the response counts as 4xx.",
            ("handler", "method", "status"),
            registry=metrics.registry,
        )
        self._duration = Histogram(
            "http_request_duration_seconds",
            "Seconds from a request's head to the end of the response.",
            ("handler", "method"),
            registry=metrics.registry,
            buckets=LONG_SECONDS,
        )

    def ended(self, request: ServedRequest) -> None:
        """Count a request that has ended."""
        self._requests.labels(request.handler, request.method, f"{request.status // 100}xx").inc()
        self._duration.labels(request.handler, request.method).observe(request.duration_s)


class GatewayMetrics:
    """Counters, gauges and histograms of a gateway.

    vLLM's names count the requests that the cluster has taken. Requests that were refused, were wrong, or were given up
    by the client before they had a place are in `moonpool_gateway_refused` and `http_requests` alone.
    """

    def __init__(self, metrics: PrometheusMetrics, clock: Callable[[], float]) -> None:
        """Register in the registry of `metrics`. `clock` returns seconds."""
        self._registry = metrics.registry
        self._models: dict[str, _OfModel] = {}
        self.http = HttpMetrics(metrics)
        self.loras = RunningLoras()
        self._registry.register(self.loras)
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
        self.cache_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens with KV at the instance that computed the others."
        )
        self.external_queries = self._counter(
            "external_prefix_cache_queries", "Prompt tokens without KV at that instance, looked up in other places."
        )
        self.external_hits = self._counter(
            "external_prefix_cache_hits", "Prompt tokens with KV loaded from kvstores and other instances."
        )
        self.ended = self._counter(
            "request_success", "Requests that had a place and have ended, by reason.", "finished_reason"
        )
        self.ttft = self._histogram("time_to_first_token_seconds", "Seconds from arrival to the first token.", SECONDS)
        self.gaps = self._histogram(
            "inter_token_latency_seconds", "Seconds between consecutive events of a streamed answer.", SECONDS
        )
        self._registry.register(_OlderName(self.gaps, "vllm:time_per_output_token_seconds"))
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean seconds per token after the first token.", SECONDS
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "Seconds from arrival to the end of the request.", LONG_SECONDS
        )
        self.queue = self._histogram(
            "request_queue_time_seconds", "Seconds that a request waited before prefill.", SECONDS
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "Seconds that computing the prompt took.", SECONDS
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "Seconds from the first token to the last.", LONG_SECONDS
        )
        self.inference = self._histogram(
            "request_inference_time_seconds", "Seconds from the start of prefill to the last token.", LONG_SECONDS
        )
        self.computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Tokens of a prompt whose KV was computed.", TOKEN_BUCKETS
        )
        self.answers = self._histogram("request_params_n", "Answers that a request wants.", ANSWERS_BUCKETS)
        self.token_limits = self._histogram(
            "request_params_max_tokens", "Limit that a request sets for an answer's tokens.", TOKEN_BUCKETS
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
    def request(self, asked: AskedFor) -> Iterator[RequestMetrics]:
        """Measure one request while the body of the `with` runs. A request without an end counts as aborted."""
        request_metrics = RequestMetrics(self, asked)
        self.open_requests += 1
        try:
            yield request_metrics
        finally:
            self.open_requests -= 1
            request_metrics.close()

    def of_model(self, model: str) -> _OfModel:
        """Return the metrics with a model's labels, by metric. Names of models are those that are served."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = _OfModel(model)
        return found

    def refused(self, status: int, code: str) -> None:
        """Count an error response."""
        self._refused.labels(str(status), code).inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"vllm:{name}", text, ("model_name", "engine", *labels), registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, ("model_name", "engine"), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", text, ("model_name", "engine"), registry=self._registry, buckets=buckets)


class _OfModel:
    """Metrics with a model's labels, looked up once."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._found: dict[object, object] = {}

    def __getitem__(self, metric: MetricT) -> MetricT:
        found = self._found.get(metric)
        if found is None:
            found = self._found[metric] = metric.labels(self._model, ENGINE)
        return cast("MetricT", found)


class RequestMetrics:
    """One request's times and counts."""

    def __init__(self, metrics: GatewayMetrics, asked: AskedFor) -> None:
        self._metrics = metrics
        self._of = metrics.of_model(asked.model)
        self._asked = asked
        self._arrived = metrics.clock()
        self._last = self._arrived
        self._placed = self._started = self._has_tokens = False
        self._gaps = self._of[metrics.gaps]
        self._reason = "abort"
        self._of[metrics.waiting].inc()
        self._of[metrics.running].inc(0)  # so that the gauge exists from the first request on
        metrics.loras.waiting(asked.lora, 1)

    def tokens(self) -> None:
        """Tokens of a streamed answer have arrived."""
        now = self._metrics.clock()
        if self._has_tokens:
            self._gaps.observe(now - self._last)
        else:
            self._has_tokens = True
            self._of[self._metrics.ttft].observe(now - self._arrived)
            self._start()
        self._last = now

    def placed(self, *, whole: bool) -> None:
        """An instance has taken the request.

        A streamed answer (not `whole`) waits until the first token. Of a whole answer, the end tells when that came.
        """
        self._placed = True
        if whole:
            self._start()

    def failed(self) -> None:
        self._reason = "error"

    def finished(self, result: GenerateResult) -> None:
        """The answer is complete."""
        metrics, of, usage, timing = self._metrics, self._of, result.usage, result.timing
        self._reason = result.finish_reason
        if not self._has_tokens and usage.completion_tokens:
            of[metrics.ttft].observe(timing.ttft_s)
        decode_s = max(0.0, timing.e2e_s - timing.ttft_s)
        local_tokens = usage.cached_tokens - usage.loaded_tokens
        of[metrics.prompt_tokens].inc(usage.prompt_tokens)
        of[metrics.generated_tokens].inc(usage.completion_tokens)
        of[metrics.cache_queries].inc(usage.prompt_tokens)
        of[metrics.cache_hits].inc(local_tokens)
        of[metrics.external_queries].inc(usage.prompt_tokens - local_tokens)
        of[metrics.external_hits].inc(usage.loaded_tokens)
        of[metrics.prompt_lengths].observe(usage.prompt_tokens)
        of[metrics.computed].observe(usage.prompt_tokens - usage.cached_tokens)
        of[metrics.answer_lengths].observe(usage.completion_tokens)
        of[metrics.answers].observe(self._asked.answers)
        of[metrics.token_limits].observe(self._asked.max_tokens)
        of[metrics.tpot].observe(timing.tpot_s)
        of[metrics.queue].observe(timing.queue_s)
        of[metrics.prefill].observe(timing.prefill_s)
        of[metrics.decode].observe(decode_s)
        of[metrics.inference].observe(timing.prefill_s + decode_s)
        of[metrics.longest_answers].observe(max((len(choice.token_ids) for choice in result.choices), default=0))

    def close(self) -> None:
        """The request is over."""
        metrics, of, lora = self._metrics, self._of, self._asked.lora
        of[metrics.running if self._started else metrics.waiting].dec()
        (metrics.loras.running if self._started else metrics.loras.waiting)(lora, -1)
        if self._placed or self._started:
            metrics.ended.labels(self._asked.model, ENGINE, self._reason).inc()
            of[metrics.e2e].observe(metrics.clock() - self._arrived)

    def _start(self) -> None:
        """The request does not wait any more."""
        if not self._started:
            self._started = True
            self._of[self._metrics.waiting].dec()
            self._of[self._metrics.running].inc()
            self._metrics.loras.waiting(self._asked.lora, -1)
            self._metrics.loras.running(self._asked.lora, 1)


class _OlderName(Collector):
    """A histogram once more, under the name that dashboards for older versions of vLLM query."""

    def __init__(self, histogram: Histogram, name: str) -> None:
        self._histogram = histogram
        self._name = name

    def describe(self) -> Iterable[MetricFamily]:
        return [HistogramMetricFamily(self._name, self._documentation)]

    def collect(self) -> Iterable[MetricFamily]:
        (family,) = self._histogram.collect()
        renamed = HistogramMetricFamily(self._name, self._documentation)
        for sample in family.samples:
            name = self._name + sample.name.removeprefix(family.name)
            renamed.add_sample(name, sample.labels, sample.value, sample.timestamp, sample.exemplar)
        return [renamed]

    @property
    def _documentation(self) -> str:
        (family,) = self._histogram.collect()
        return f"{family.documentation} Older name of {family.name}."


class RunningLoras(Collector):
    """LoRA adapters with requests, as vLLM shows them to routers: names in labels, the time as value."""

    def __init__(self) -> None:
        self._waiting: Count[str] = Count()
        self._running: Count[str] = Count()

    def waiting(self, lora: str, change: int) -> None:
        """Change the number of an adapter's requests that wait; "" is no adapter."""
        self._waiting[lora] += change

    def running(self, lora: str, change: int) -> None:
        """Change the number of an adapter's requests that have an answer under way; "" is no adapter."""
        self._running[lora] += change

    def collect(self) -> Iterable[MetricFamily]:
        """The adapters now; runs on a scrape's thread."""
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Seconds since 1970; the labels have the LoRA adapters with requests that wait, and that run. An engine "
            "alone limits the adapters, so `max_lora` is 0.",
            labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        )
        family.add_metric(("0", _names(self._waiting), _names(self._running)), world.unix_time())
        return [family]


def _names(counts: Count[str]) -> str:
    return ",".join(sorted(name for name, count in list(counts.items()) if count and name))


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
        older_usage = GaugeMetricFamily(
            "vllm:gpu_cache_usage_perc", "The same under the older name of kv_cache_usage_perc.", labels=names
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
            for family in (usage, older_usage):
                family.add_metric(labels, max(0.0, 1.0 - kept / total) if total else 0.0)
            preemptions.add_metric(labels, sum(instance.preemptions for instance in decodes))
            drafted.add_metric(labels, sum(instance.draft_tokens for instance in decodes))
            accepted.add_metric(labels, sum(instance.accepted_tokens for instance in decodes))
            config.add_metric((str(state.block_size), str(total), "True", ENGINE), 1.0)
        return usage, older_usage, preemptions, drafted, accepted, config
