"""Prometheus metrics: a service's `MetricSet`, and histograms where a single number says too little.

Names are `moonpool_<service>_<metric>`. The same port answers the probes of orchestrators.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from moonpool.base.config import ServiceConfig, is_loopback, parse_address
from moonpool.base.errors import ConfigError
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.telemetry.metrics import MetricKind, MetricSample, MetricSet
from moonpool.base.telemetry.metrics_server import TEXT, Answer, MetricsServer
from moonpool.base.telemetry.process_info import CertificateExpiry, register_process

PROBE_S = 1.0
"""Seconds in which the service's event loop answers a probe."""
SCRAPE_TIMEOUT_S = 5.0
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Bucket bounds for latencies."""
LONG_SECONDS = (*SECONDS, 60.0, 120.0, 300.0, 600.0)
"""Bucket bounds for whole requests, and for waits that may be as long."""
AGES = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0, 7 * 24 * 3600.0)
"""Bucket bounds for lifetimes and gaps, from seconds to a week."""

_FAMILIES = {MetricKind.GAUGE: GaugeMetricFamily, MetricKind.COUNTER: CounterMetricFamily}

log = get_logger(__name__)


class PrometheusMetrics:
    """What one process exports to Prometheus.

    Attributes:
        registry: what is exported; independent of the library's global registry, so that tests can have many.
        ready: what new requests wait for, "" = nothing. Called on the service's event loop.
    """

    def __init__(self, service: str) -> None:
        """Metrics for the service with that name, as in `moonpool_<service>_...`."""
        self.registry = CollectorRegistry()
        self._prefix = f"moonpool_{service}_"
        self.ready: Callable[[], str] = lambda: "the service starts"

    @classmethod
    def of(cls, config: ServiceConfig, **certificates: Path | None) -> PrometheusMetrics:
        """Metrics of a service with these settings.

        `certificates` are the files of the settings that name further certificates than `tls_cert`.
        """
        metrics = cls(config.service())
        register_process(metrics.registry, config.service())
        metrics.registry.register(CertificateExpiry({"tls_cert": config.tls_cert, **certificates}))
        return metrics

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], labels: Iterable[str] = (), service: str = ""
    ) -> Histogram:
        """A histogram; observing costs about a microsecond. `service`: in the name, if not this process's own."""
        prefix = f"moonpool_{service}_" if service else self._prefix
        return Histogram(prefix + name, text, tuple(labels), registry=self.registry, buckets=tuple(buckets))

    def counter(self, name: str, text: str, labels: Iterable[str]) -> Counter:
        """A counter whose labels' values are known when something happens; the name is without `_total`.

        A number that an object keeps is an entry in the table of a `MetricSet`.
        """
        return Counter(self._prefix + name, text, tuple(labels), registry=self.registry)

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
        """Serve `/metrics`, `/livez` and `/readyz` at "host:port" (port 0 = any free port); "" = no server.

        `/livez` says 200 while the event loop that runs now answers. `/readyz` says 200 while `ready` returns "".

        Yields:
            The served address, "" for none.

        Raises:
            ConfigError: naming `metrics_listen`: the address cannot be used.
        """
        if not listen:
            yield ""
            return
        probe = _Probe(self, asyncio.get_running_loop())
        try:
            paths = {"/metrics": probe.metrics, "/livez": probe.livez, "/readyz": probe.readyz}
            server = await asyncio.to_thread(MetricsServer, listen, paths)
        except OSError as error:
            raise ConfigError("metrics_listen", f"cannot listen at {listen}: {error.strerror or error}") from error
        log.info("serving metrics", address=server.address)
        if not is_loopback(parse_address(listen)[0]):
            log.warning("metrics are in plaintext and open to all who reach them; see metrics_listen", listen=listen)
        try:
            yield server.address
        finally:
            await asyncio.to_thread(server.__exit__)


class _Probe:
    """Answers scrapes and probes on the metrics server's loop, with what the service's loop knows."""

    def __init__(self, metrics: PrometheusMetrics, loop: asyncio.AbstractEventLoop) -> None:
        self._metrics = metrics
        self._loop = loop

    async def metrics(self, accept: str) -> Answer:
        try:
            body, content_type = await asyncio.to_thread(exposition, self._metrics.registry, accept)
        except TimeoutError:
            return 503, b"the service does not answer\n", TEXT
        except Exception:
            log.exception("a scrape failed")
            return 500, b"the metrics cannot be read; the log says why\n", TEXT
        return 200, body, content_type

    async def livez(self, accept: str) -> Answer:
        return await self._asked(lambda: "")

    async def readyz(self, accept: str) -> Answer:
        return await self._asked(lambda: self._metrics.ready())

    async def _asked(self, lacking: Callable[[], str]) -> Answer:
        """Ask on the service's loop what is lacking: a loop that is stuck answers no probe."""

        async def ask() -> str:
            return lacking()

        try:
            asking = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(), self._loop))
            text = await asyncio.wait_for(asking, PROBE_S)
        except TimeoutError:
            text = f"the service's event loop has not answered for {PROBE_S:g} s"
        return (503, f"{text}\n".encode(), TEXT) if text else (200, b"ok\n", TEXT)


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The metrics in the format that a client accepts, and the content type.

    Args:
        registry: the metrics.
        accept: the request's `Accept` header, "" for none.
    """
    encoder, content_type = choose_encoder(keeping_colons(accept))
    return encoder(registry), content_type


def exposition_type(accept: str) -> str:
    """The content type of what `exposition` makes for a request's `Accept` header."""
    content_type: str = choose_encoder(keeping_colons(accept))[1]
    return content_type


def keeping_colons(accept: str) -> str:
    """The `Accept` header, but asking for names as they are.

    prometheus_client replaces the colons in vLLM's names in OpenMetrics text if a client asks for names with
    underscores, or does not say. Colons are allowed in names of every exposition format.
    """
    ranges = [
        [part for part in choice.split(";") if not part.strip().startswith("escaping")] for choice in accept.split(",")
    ]
    return ",".join(";".join([*parts, "escaping=allow-utf-8"]) for parts in ranges)


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
