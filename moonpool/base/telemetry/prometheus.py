"""Prometheus metrics over HTTP: a service's `MetricSet`, and histograms where a single number says too little.

The endpoint has a separate address, so that scraping never competes with the service's RPCs for a listener. Names are
`moonpool_<service>_<metric>`.
"""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Histogram, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from moonpool.base.config import format_address, is_loopback, parse_address
from moonpool.base.errors import ConfigError
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.metrics import MetricKind, MetricSample, MetricSet

SCRAPE_TIMEOUT_S = 5.0
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Bucket bounds for latencies."""
AGES = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0, 7 * 24 * 3600.0)
"""Bucket bounds for lifetimes and gaps, from seconds to a week."""

_FAMILIES = {MetricKind.GAUGE: GaugeMetricFamily, MetricKind.COUNTER: CounterMetricFamily}

log = get_logger(__name__)


class PrometheusMetrics:
    """What one process exports to Prometheus.

    Attributes:
        registry: what is exported; independent of the library's global registry, so that tests can have many.
    """

    def __init__(self, service: str) -> None:
        """Metrics for the service with that name, as in `moonpool_<service>_...`."""
        self.registry = CollectorRegistry()
        self._prefix = f"moonpool_{service}_"

    def histogram(self, name: str, text: str, buckets: Sequence[float], labels: Iterable[str] = ()) -> Histogram:
        """A histogram; observing costs about a microsecond."""
        return Histogram(self._prefix + name, text, tuple(labels), registry=self.registry, buckets=tuple(buckets))

    def watch(self, metrics: MetricSet, service: str = "") -> Callable[[], None]:
        """Export `metrics`, which each scrape reads on the event loop that runs now; returns what ends that.

        `service`: in the names, if not this process's own.
        """
        prefix = f"moonpool_{service}_" if service else self._prefix
        collector = _SetCollector(prefix, metrics, asyncio.get_running_loop())
        self.registry.register(collector)
        return partial(self.registry.unregister, collector)

    @asynccontextmanager
    async def served(self, listen: str) -> AsyncIterator[str]:
        """Serve `GET /metrics` at "host:port" (port 0 = any free port), from separate threads; "" = no server.

        Yields:
            The served address, "" for none.

        Raises:
            ConfigError: naming `metrics_listen`: the address cannot be used.
        """
        if not listen:
            yield ""
            return
        host, port = parse_address(listen)
        server_class = _ServerV6 if ":" in host else _Server
        try:
            server = make_server(host, port, self._scraped, server_class, handler_class=_QuietHandler)
        except OSError as error:
            raise ConfigError("metrics_listen", f"cannot listen at {listen}: {error.strerror or error}") from error
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        address = format_address(host, server.server_port)
        log.info("serving metrics", address=address)
        if not is_loopback(host):
            log.warning("metrics are in plaintext and open to all who reach them; see metrics_listen", listen=listen)
        try:
            yield address
        finally:
            await asyncio.to_thread(server.shutdown)
            server.server_close()
            await asyncio.to_thread(thread.join)

    def _scraped(self, environ: dict[str, Any], start_response: Any) -> Any:
        accept = keeping_colons(environ.get("HTTP_ACCEPT", ""))
        return make_wsgi_app(self.registry)({**environ, "HTTP_ACCEPT": accept}, start_response)


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The metrics in the format that a client accepts, and the content type.

    Args:
        registry: the metrics.
        accept: the request's `Accept` header, "" for none.
    """
    encoder, content_type = choose_encoder(keeping_colons(accept))
    return encoder(registry), content_type


def keeping_colons(accept: str) -> str:
    """The `Accept` header, but asking for names as they are.

    prometheus_client replaces the colons in vLLM's names in OpenMetrics text if a client asks for names with
    underscores, or does not say. Colons are allowed in names of every exposition format.
    """
    ranges = [
        [part for part in choice.split(";") if not part.strip().startswith("escaping")] for choice in accept.split(",")
    ]
    return ",".join(";".join([*parts, "escaping=allow-utf-8"]) for parts in ranges)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log no request."""


class _SetCollector(Collector):
    """Reads metrics on their event loop, from a scrape's thread."""

    def __init__(self, prefix: str, metrics: MetricSet, loop: asyncio.AbstractEventLoop) -> None:
        self._prefix = prefix
        self._metrics = metrics
        self._loop = loop

    def describe(self) -> Iterable[MetricFamily]:
        """Return no metric, so that registering reads none."""
        return []

    def collect(self) -> Iterable[MetricFamily]:

        async def read() -> list[MetricSample]:
            return list(self._metrics.samples())

        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for metric, labels, value in asyncio.run_coroutine_threadsafe(read(), self._loop).result(SCRAPE_TIMEOUT_S):
            family = families.get(metric.name)
            if family is None:
                kind = _FAMILIES[metric.kind]
                family = families[metric.name] = kind(self._prefix + metric.name, metric.help, labels=list(labels))
            family.add_metric(list(labels.values()), value)
        return families.values()
